"""The network between simulated processes: delays, losses, duplicates, cuts and crashes.

A message is encoded as it is on a real wire, travels for a time drawn from the link's own seeded
generator, and is decoded at the other end, so nothing is shared between processes but what they
send. When a process crashes all its tasks end, and nothing that they do on their way out leaves the
process. What was sent arrives even if its sender is paused; what arrives at a paused process waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, TypeVar

import numpy as np

from dps.errors import DeadlineExceeded, DpsError, NotServing, Unreachable
from dps.protocol import wire
from dps.protocol.messages import (
    Done,
    GetTable,
    Pull,
    Renewed,
    RenewLease,
    RenewWorker,
    Sighted,
    Table,
    Waiting,
)
from dps.protocol.transport import Endpoint
from dps.sim.loop import VirtualLoop
from dps.sim.process import Process, Unforeseen, here
from dps.sim.violation import Violation

T = TypeVar("T")

Line = tuple[float, str, str, str, str]
Reply = asyncio.Future[wire.Frames | None]  # None: the connection was refused or lost

# Messages of plain values that cannot be changed, and that are sent again and again.
REPEATED = frozenset(
    {RenewLease, RenewWorker, Renewed, GetTable, Table, Done, Waiting, Pull, Sighted}
)
ECHOED = 0.3
LATE = (0.1, 3.0)  # seconds after which requests arrive again
READING = 0.0001  # seconds that it takes to read a message that has been waiting
ROUNDING = 1e-6  # seconds by which sums of times may be off


@dataclass(frozen=True, slots=True)
class Weather:
    """What the network does to messages, drawn for each link and message.

    Parameters
    ----------
    delays
        The shortest and the longest mean delay of a link, in seconds; a message takes half of its
        link's mean or more, without an upper bound, so messages overtake one another.
    loss
        The fraction of messages of each link kind that is lost. Half of the losses break the
        connection, and the caller learns of it; of the others it only sees that no reply comes.
    duplicated
        The fraction of requests that arrive twice.
    """

    delays: tuple[float, float] = (0.0002, 0.005)
    loss: dict[str, float] = field(default_factory=dict)
    duplicated: float = 0.0


class _Link:
    """One direction between two names: how it delays, and what it draws its chances from."""

    __slots__ = ("mean", "random")

    def __init__(self, random: Random, delays: tuple[float, float]) -> None:
        shortest, longest = delays
        self.random = random
        self.mean: float = shortest * (longest / shortest) ** random.random()

    def delay(self) -> float:
        return self.mean * (0.5 + self.random.expovariate(2.0))


class Network:
    """Connects processes. Used from one virtual event loop.

    Attributes
    ----------
    trace
        Everything that was sent, lost or crashed, with its time.
    watchers
        Called with each line of the trace as it is written, but its time.
    bugs
        Errors that ended a task and are not dps's own.
    refusals
        The last error of each type that a request was answered with.
    on_answer
        Called with a process, a request of a client's or for a lease, and the reply.
    nowhere
        The context of what belongs to no process: what is under way is in nobody's hands.
    broken
        The first promise that is seen to be broken.
    reads_late
        Whether a process that was paused reads what came meanwhile only after its timers are due.
    """

    def __init__(self, random: Random, weather: Weather) -> None:
        self.trace: list[Line] = []
        self.watchers: list[Callable[[str, str, str, str], None]] = []
        self.bugs: list[BaseException] = []
        self.refusals: dict[type, DpsError] = {}
        self.on_answer: Callable[[Process, Any, wire.Frames], None] = _unheard
        self.weather = weather
        self.reads_late = False
        self._seed = random.getrandbits(64)
        self._loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[Violation] = self._loop.create_future()
        self._loop.set_task_factory(self._task)
        self.courier = Courier()
        self.nowhere = copy_context()
        self._processes: dict[str, Process] = {}
        self._links: dict[tuple[str, str], _Link] = {}
        self._cut: Counter[tuple[str, str]] = Counter()
        self._lossy: dict[tuple[str, str], float] = {}
        self._echoing: Counter[str] = Counter()

    def process(self, name: str) -> Process:
        """Start an empty process, at an address that none had before."""
        process = Process(name, self.address(name, len(self._processes)))
        self._processes[process.address] = process
        return process

    def address(self, name: str, number: int) -> str:
        """The address of a process, of which `number` were started before."""
        return f"sim://{name}/{number}"

    async def serve(self, target: Process, key: str, link: str, frames: wire.Frames) -> Any:
        """Have a request carried out where it has arrived; return the reply."""
        courier = self.courier
        try:
            if key not in target.services:
                raise NotServing(f"there is no {key} at {target.address}")
            return courier.encode(await target.services[key](courier.decode(frames)))
        except DpsError as error:
            self.refusals[type(error)] = error
            return wire.encode(error)

    def carry(
        self,
        source: Process,
        target: Process,
        kind: str,
        frames: wire.Frames,
        delay: float,
        arrive: Callable[[], None],
        back: bool,
    ) -> None:
        """Have frames arrive after the delay of their link; `back` says that they are a reply."""
        self._later(delay, arrive)

    # -- faults ----------------------------------------------------------------------------------

    def crash(self, process: Process, silent: bool = False) -> None:
        """End a process at once: its memory is lost, and whoever waits for it learns of it soon.

        If it is `silent`, like one whose machine has lost its power, nobody does until `reveal`.
        """
        self.note("crash", process.name, "", "")
        process.alive, process.silent = False, silent
        process.ended_at = self._loop.time()
        for task in process.tasks:
            task.cancel()
        self.resume(process)
        if not silent:
            self._refuse_all(process)

    def reveal(self, process: Process) -> None:
        """Have it known from now on that a process has ended."""
        if process.silent:
            process.silent = False
            self._refuse_all(process)

    def _refuse_all(self, process: Process) -> None:
        for reply in process.expected:
            self._later(self._link(process.name, process.name).delay(), _refuse, reply)

    def pause(self, process: Process, busy: bool = False, clock_stands: bool = False) -> None:
        """Let nothing of a process run until it is resumed; what it is sent waits.

        It is stopped, or its virtual machine is and the `clock_stands`, or it is `busy`.
        """
        if process.paused_at is None and process.alive:
            self.note("pause", process.name, "", "")
            process.paused_at, process.busy = self._loop.time(), busy
            process.clock_stands = clock_stands
            self._virtual.pause(process)

    def resume(self, process: Process) -> None:
        """Continue a paused process."""
        if process.paused_at is not None:
            self.note("resume", process.name, "", "")
            paused = self._loop.time() - process.paused_at
            process.stood += paused
            process.missed += paused if process.clock_stands else 0.0
            process.paused_at, process.busy, process.clock_stands = None, False, False
            self._virtual.resume(process)
            unread, process.unread = process.unread, []
            for number, arrive in enumerate(unread, 1):
                self._later(number * READING, arrive)

    def cut(self, source: str, target: str) -> None:
        """Lose whatever the processes of one name send to those of another, in this direction."""
        self._cut[source, target] += 1

    def mend(self, source: str, target: str) -> None:
        """Undo one cut."""
        self._cut[source, target] -= 1

    def is_cut(self, source: str, target: str) -> bool:
        """Whether what one sends to the other is lost."""
        return self._cut[source, target] > 0

    def is_any_cut(self, source: str) -> bool:
        """Whether anything that one sends is lost."""
        return any(number > 0 for (name, _), number in self._cut.items() if name == source)

    def lose(self, source: str, target: str, fraction: float) -> None:
        """Lose this fraction of what one sends to another, whatever the weather."""
        self._lossy[source, target] = fraction

    def slow(self, source: str, target: str, mean: float) -> None:
        """Set the mean delay of messages from the processes of one name to those of another."""
        self._link(source, target).mean = mean

    def mean_delay(self, source: str, target: str) -> float:
        """The mean delay of messages from one name to another."""
        return self._link(source, target).mean

    def work_takes(self, seconds: float) -> None:
        """Set the longest time that work in threads takes."""
        self._virtual.work = seconds

    def echo(self, name: str, times: int = 1) -> None:
        """Have some of what the processes of a name send and are sent arrive again much later."""
        self._echoing[name] += times

    def heal(self) -> None:
        """Undo every cut and loss."""
        self._cut.clear()
        self._lossy.clear()
        self._echoing.clear()

    def note(self, what: str, source: str, target: str, message: str) -> None:
        """Add a line to the trace."""
        self.trace.append((round(self._loop.time(), 9), what, source, target, message))
        for watcher in self.watchers:
            watcher(what, source, target, message)

    def report(self, violation: Violation) -> None:
        """Say that a promise was broken."""
        if not self.broken.done():
            self.broken.set_result(violation)

    # -- messages --------------------------------------------------------------------------------

    async def ask(
        self,
        source: Process,
        to: Endpoint,
        link: str,
        message: Any,
        frames: wire.Frames,
        deadline: float,
    ) -> wire.Frames:
        """Bring a request to its service and the reply back.

        Raises
        ------
        TimeoutError
            There was no reply within the deadline.
        """
        if not source.alive:
            raise asyncio.CancelledError  # a dead process sends nothing
        name = type(message).__name__
        target = self._processes[to.address]
        reply: Reply = self._loop.create_future()
        target.expected[reply] = None
        request = _Request(self, source, target, to.key, link, message, frames, reply)
        # `asyncio.timeout` would cancel the task, and take as much time as the rest of a message.
        timer = self._loop.call_later(deadline, request.expire)
        try:
            if self._send(source, target, name, link, frames, reply, request.arrive):
                self._perhaps_again(source, target, name, request.arrive)
                self._perhaps_late(source, target, name, request.arrive)
            answered = await reply
            if request.expired:  # who stood still may find a reply as well: it is too late
                raise TimeoutError
            if answered is None:
                raise Unreachable(f"the connection to {target.name} was refused or lost")
            return answered
        finally:
            timer.cancel()
            del target.expected[reply]

    async def probe(self, source: Process, address: str) -> bool:
        """Whether a connection from `source` to the process at an address would be refused."""
        target = self._processes[address]
        there, back = (source.name, target.name), (target.name, source.name)
        await asyncio.sleep(self._link(*there).delay() + self._link(*back).delay())
        refused = not target.alive and not target.silent
        return refused and not self.is_cut(*there) and not self.is_cut(*back)

    def _send(
        self,
        source: Process,
        target: Process,
        name: str,
        kind: str,
        frames: wire.Frames,
        reply: Reply,
        arrive: Callable[[], None],
        back: bool = False,
    ) -> bool:
        """Send something on its way, unless it is lost."""
        ends = (source.name, target.name)
        link = self._link(*ends)
        delay = link.delay()
        lost = self.weather.loss.get(kind, 0.0)
        if self._lossy:
            lost = max(lost, self._lossy.get(ends, 0.0))
        if self._cut.get(ends, 0) > 0:  # a counter asked by index is slow for what it lacks
            self.note("cut", *ends, name)
            return False
        if link.random.random() < lost:
            self.note("lost", *ends, name)
            if link.random.random() < 0.5:
                self._later(delay, _refuse, reply)
            return False
        self.note("sent", *ends, name)
        torn_or_not = partial(self._unless_torn, source, link, arrive)
        self.carry(source, target, kind, frames, delay, torn_or_not, back)
        return True

    def _perhaps_again(
        self, source: Process, target: Process, name: str, arrive: Callable[[], None]
    ) -> None:
        """Have some requests arrive a second time; the second reply is in vain."""
        link = self._link(source.name, target.name)
        if link.random.random() < self.weather.duplicated:
            self.note("sent again", source.name, target.name, name)
            self._later(link.delay() + link.delay(), self._unless_torn, source, link, arrive)

    def _perhaps_late(
        self, source: Process, target: Process, name: str, arrive: Callable[[], None]
    ) -> None:
        """Have some requests arrive again when either end of them may have gone."""
        echoing = self._echoing
        if echoing and (echoing[source.name] > 0 or echoing[target.name] > 0):
            random = self._link(source.name, target.name).random
            if random.random() < ECHOED:
                self.note("late", source.name, target.name, name)
                self._later(random.uniform(*LATE), arrive)

    def _unless_torn(self, source: Process, link: _Link, arrive: Callable[[], None]) -> None:
        """Half of what a process was sending when it crashed had not left it."""
        if source.alive or link.random.random() < 0.5:
            arrive()

    def _later(self, delay: float, callback: Callable[..., None], *args: Any) -> None:
        self._loop.call_later(delay, callback, *args, context=self.nowhere)

    def _link(self, source: str, target: str) -> _Link:
        link = self._links.get((source, target))
        if link is None:
            # A generator of its own: a message more or less on one link changes no other.
            random = Random(f"{self._seed} {source} {target}")
            link = self._links[source, target] = _Link(random, self.weather.delays)
        return link

    @property
    def _virtual(self) -> VirtualLoop:
        assert isinstance(self._loop, VirtualLoop)
        return self._loop

    def _task(
        self, loop: asyncio.AbstractEventLoop, work: Any, *, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """Make a task and enter it in the process that it runs in."""
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
        process = here.get() if context is None else context.get(here)
        if process is not None:
            process.tasks[task] = None
            task.add_done_callback(partial(self._ended, process), context=self.nowhere)
        return task

    def _ended(self, process: Process, task: asyncio.Task[Any]) -> None:
        del process.tasks[task]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Violation):
            self.report(error)
        elif error is not None and not isinstance(error, DpsError | Unforeseen):
            self.bugs.append(error)
            self.report(Violation("bug", f"in {process.name}: {error!r}"))


class _Request:
    """What was asked, on its way and back; nothing in it leads back to it, so it needs no gc."""

    __slots__ = (
        *("_network", "_source", "_target", "_key", "_link", "_message", "_frames", "_reply"),
        "expired",
    )

    def __init__(
        self,
        network: Network,
        source: Process,
        target: Process,
        key: str,
        link: str,
        message: Any,
        frames: wire.Frames,
        reply: Reply,
    ) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._key = key
        self._link = link
        self._message = message
        self._frames = frames
        self._reply = reply
        self.expired = False

    def arrive(self) -> None:
        """Have the target read it; it may arrive more than once."""
        target = self._target
        if not target.alive:
            if not target.silent:
                _refuse(self._reply)
        elif self._network.reads_late and target.paused_at is not None:
            target.unread.append(self.arrive)
        else:
            target.run(self._carry_out()).add_done_callback(self._answer)

    async def _carry_out(self) -> wire.Frames:
        network, target, message = self._network, self._target, self._message
        frames: wire.Frames = await network.serve(target, self._key, self._link, self._frames)
        if self._link == "train" or type(message) is RenewLease:
            network.on_answer(target, message, frames)
        return frames

    def expire(self) -> None:
        """Wait for no reply any longer."""
        self.expired = True
        if not self._reply.done():
            self._reply.set_result([])

    def _answer(self, serving: asyncio.Task[wire.Frames]) -> None:
        if serving.cancelled() or serving.exception() is not None:
            return
        network, target, message = self._network, self._target, self._message
        frames = serving.result()
        fulfil = partial(_fulfil, self._reply, frames)
        name = f"{type(message).__name__} reply"
        ends = target, self._source
        network._send(*ends, name, self._link, frames, self._reply, fulfil, back=True)


class Courier:
    """Brings messages into the form of the wire and back.

    Most are short and have been sent before, word for word: leases, tables, acknowledgements.
    Their form is looked up, and what nobody can change is handed out again.
    """

    def __init__(self) -> None:
        self._encoded: dict[Any, wire.Frames] = {}
        self._decoded: dict[bytes, Any] = {}

    def encode(self, message: Any) -> wire.Frames:
        """Frames that nobody can write to: what is on the wire is out of the sender's hands."""
        if type(message) in REPEATED:
            frames = self._encoded.get(message)
            if frames is None:
                frames = self._encoded[message] = wire.encode(message)
            return frames
        header, *arrays = wire.encode(message)
        copies = [array.copy() for array in arrays]
        for copy in copies:
            copy.setflags(write=False)
        return [header, *copies]

    def decode(self, frames: wire.Frames) -> Any:
        """The message of these frames; raises the error if they carry one."""
        if len(frames) > 1:
            return wire.decode(frames)
        header = frames[0].tobytes()
        message = self._decoded.get(header)
        if message is None:
            message = wire.decode(frames)
            if type(message) in REPEATED:
                self._decoded[header] = message
        return message


class SimTransport:
    """Calls from one process to others (see `dps.protocol.transport.Transport`)."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process
        self._loop = asyncio.get_running_loop()

    async def call(self, to: Endpoint, message: Any, deadline: float, link: str = "control") -> Any:
        """Send a message and return the reply."""
        courier = self._network.courier
        frames = courier.encode(message)
        latest = self._loop.time() - self._process.stood + deadline
        try:
            reply = await self._network.ask(self._process, to, link, message, frames, deadline)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{type(message).__name__} to {to.key} at {to.address}: no reply in {deadline:g} s"
            ) from None
        finally:
            late = self._loop.time() - self._process.stood - latest
            if late > ROUNDING:
                what = f"{self._process.name}: {type(message).__name__}"
                text = f"{what} took {late:g} s more than its deadline"
                self._network.report(Violation("deadline", text))
        return courier.decode(reply)

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return an array to send (see `dps.protocol.transport.Transport`): any memory will do."""
        return np.empty(shape, dtype)

    async def gone(self, address: str) -> bool:
        """Whether the process at the address has ended; what a cut keeps from us is not known."""
        return await self._network.probe(self._process, address)


def _unheard(process: Process, message: Any, frames: wire.Frames) -> None:
    pass


def _fulfil(reply: Reply, frames: wire.Frames) -> None:
    if not reply.done():
        reply.set_result(frames)


def _refuse(reply: Reply) -> None:
    if not reply.done():
        reply.set_result(None)
