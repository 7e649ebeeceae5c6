"""The network between simulated processes: delays, losses, duplicates, cuts and crashes.

A message is encoded as on a real wire, travels for a time drawn from the link's own seeded
generator, and is decoded at the other end, so processes share only the messages that they send.
When a process crashes, all its tasks end, and no message that they send during cancellation leaves
the process. Messages arrive even if their sender is paused; messages to a paused process wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, TypeVar

import numpy as np

import dps.virtual.loop
from dps.errors import DeadlineExceeded, DpsError, NotServing
from dps.protocol import wire
from dps.protocol.messages import (
    GetTable,
    Renewed,
    RenewLease,
    RenewWorker,
    Sighted,
    Table,
    Waiting,
)
from dps.protocol.transport import Done, Endpoint
from dps.virtual import network
from dps.virtual.loop import EPOCH_SECONDS, VirtualLoop, only_errors
from dps.virtual.network import refuse, unless_torn
from dps.virtual.profile import PLENTY

T = TypeVar("T")
Line = tuple[float, str, str, str, str]

# Messages of immutable plain values, which are sent repeatedly.
REPEATED = frozenset(
    {RenewLease, RenewWorker, Renewed, GetTable, Table, type(None), Waiting, Sighted}
)
ECHOED = 0.3
LATE = (0.1, 3.0)  # seconds after which requests arrive again
READING = 0.0001  # seconds to read a waiting message
ROUNDING = 1e-6  # seconds by which sums of times may be off


@dataclass(frozen=True, slots=True)
class Weather:
    """The faults of the network, drawn for each link and message.

    Parameters
    ----------
    delays
        The shortest and the longest mean delay of a link, in seconds; a message takes half of its
        link's mean or more, without an upper bound, so messages overtake one another.
    loss
        The fraction of messages of each link kind that is lost. Half of the losses break the
        connection, which the caller notices; for the others, the caller only misses the reply.
    duplicated
        The fraction of requests that arrive twice.
    """

    delays: tuple[float, float] = (0.0002, 0.005)
    loss: dict[str, float] = field(default_factory=dict)
    duplicated: float = 0.0


class Unforeseen(Exception):
    """An exception unknown to dps, raised on purpose by a simulation."""


class Violation(AssertionError):
    """The protocol broke a promise.

    Attributes
    ----------
    kind
        Name of the promise, in a word or two; it stays the same while a schedule is shrunk.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Process(dps.virtual.loop.Process):
    """A simulated process with all kinds of failures.

    Attributes
    ----------
    rate, offset
        Rate of its monotonic clock, and error of its wall clock in seconds.
    busy
        Whether it only seems paused to others: it works, but does not answer.
    clock_stands
        Whether its monotonic clock stands still while it is paused, as on a paused virtual machine.
    missed
        Seconds that its monotonic clock has stood still.
    machine
        The machine; processes of a machine share a power supply and a disk cache.
    silent
        Whether it has ended silently: messages to it are not refused.
    ended_at
        Time of its end; None while it is alive.
    doomed_in
        Steps of its background tasks until one of them raises an exception; 0: none does.
    doomed
        Whether a background task has raised an exception.
    unread
        Messages that arrived while it was paused, as calls that process them.
    """

    def __init__(self, name: str, address: str) -> None:
        super().__init__(name, address)
        self.machine = name
        self.silent = False
        self.ended_at: float | None = None
        self.unread: list[Callable[[], None]] = []
        self.rate = 1.0
        self.offset = 0.0
        self.busy = False
        self.clock_stands = False
        self.missed = 0.0
        self.doomed_in = 0
        self.doomed = False

    @property
    def is_stopped(self) -> bool:
        """Whether it seems stopped to a monitor."""
        return super().is_stopped and not self.busy


class SimClock:
    """The virtual time on the clocks of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        """Seconds since the Unix epoch, in the simulated world."""
        return EPOCH_SECONDS + self._process.offset + self._loop.time()

    def monotonic(self) -> float:
        """Seconds since the simulation began, on a clock that may run slightly fast or slow."""
        return self._process.rate * (self._loop.time() - self._process.missed)


class Network(network.Network[Process]):
    """A network on which messages are lost, duplicated and late, and links are cut.

    Attributes
    ----------
    trace
        All sends, losses and crashes, with their times.
    watchers
        Called with each new line of the trace, without its time.
    bugs
        Errors that ended a task and are not errors of dps.
    refusals
        The last error reply of each type.
    on_answer
        Called with a process, a request (from a client or for a lease) and the reply.
    broken
        The first promise found broken.
    reads_late
        Whether a resumed process reads waiting messages only after its due timers.
    """

    def __init__(self, random: Random, weather: Weather) -> None:
        super().__init__(random, PLENTY, Process)
        self.requests = _Request
        self.trace: list[Line] = []
        self.watchers: list[Callable[[str, str, str, str], None]] = []
        self.bugs: list[BaseException] = []
        self.refusals: dict[type, DpsError] = {}
        self.on_answer: Callable[[Process, Any, wire.Frames], None] = _unheard
        self.weather = weather
        self.reads_late = False
        self.broken: asyncio.Future[Violation] = self._loop.create_future()
        self.courier = Courier()
        self._cut: Counter[tuple[str, str]] = Counter()
        self._lossy: dict[tuple[str, str], float] = {}
        self._echoing: Counter[str] = Counter()

    def _address(self, name: str, number: int) -> str:
        return f"sim://{name}/{number}"

    async def serve(self, target: Process, key: str, link: str, frames: wire.Frames) -> Any:
        """Execute a request at its target; return the reply."""
        courier = self.courier
        try:
            if key not in target.services:
                raise NotServing(f"there is no {key} at {target.address}")
            return courier.encode(await target.services[key](courier.decode(frames)))
        except DpsError as error:
            self.refusals[type(error)] = error
            return wire.encode(error)

    # -- faults ----------------------------------------------------------------------------------

    def crash(self, process: Process, silent: bool = False) -> None:
        """End a process at once: its memory is lost, and pending requests to it soon fail.

        If it is `silent`, as after a loss of power, they do not fail until `reveal`.
        """
        self.note("crash", process.name, "", "")
        process.silent, process.ended_at = silent, self._loop.time()
        super().crash(process)

    def reveal(self, process: Process) -> None:
        """Reveal that a process has ended."""
        if process.silent:
            process.silent = False
            self._refuse_all(process)

    def _refuse_all(self, process: Process) -> None:
        if not process.silent:
            super()._refuse_all(process)

    def pause(self, process: Process, busy: bool = False, clock_stands: bool = False) -> None:
        """Stop a process until it is resumed; messages to it wait.

        With `clock_stands`, its virtual machine is stopped; with `busy`, the process only seems so.
        """
        if process.paused_at is None and process.alive:
            self.note("pause", process.name, "", "")
            process.busy, process.clock_stands = busy, clock_stands
            super().pause(process)

    def resume(self, process: Process) -> None:
        """Continue a paused process."""
        if process.paused_at is not None:
            self.note("resume", process.name, "", "")
            if process.clock_stands:
                process.missed += self._loop.time() - process.paused_at
            process.busy = process.clock_stands = False
            super().resume(process)
            unread, process.unread = process.unread, []
            for number, arrive in enumerate(unread, 1):
                self.later(number * READING, arrive)

    def cut(self, source: str, target: str) -> None:
        """Lose all messages from the processes of one name to those of another."""
        self._cut[source, target] += 1

    def mend(self, source: str, target: str) -> None:
        """Undo one cut."""
        self._cut[source, target] -= 1

    def is_cut(self, source: str, target: str) -> bool:
        """Whether messages from one to the other are lost."""
        return self._cut[source, target] > 0

    def is_any_cut(self, source: str) -> bool:
        """Whether anything that one sends is lost."""
        return any(number > 0 for (name, _), number in self._cut.items() if name == source)

    def lose(self, source: str, target: str, fraction: float) -> None:
        """Lose this fraction of messages from one to another, independent of the weather."""
        self._lossy[source, target] = fraction

    def slow(self, source: str, target: str, mean: float) -> None:
        """Set the mean delay of messages from the processes of one name to those of another."""
        self._link(source, target).mean = mean

    def mean_delay(self, source: str, target: str) -> float:
        """The mean delay of messages from one name to another."""
        return self._link(source, target).mean

    def work_takes(self, seconds: float) -> None:
        """Set the maximum duration of work in threads."""
        self._loop.work = seconds

    def echo(self, name: str, times: int = 1) -> None:
        """Deliver some messages to and from the processes of a name again, much later."""
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
        """Report a broken promise."""
        if not self.broken.done():
            self.broken.set_result(violation)

    # -- messages --------------------------------------------------------------------------------

    async def probe(self, source: Process, address: str) -> bool:
        """Whether a connection from `source` to the process at an address would be refused."""
        target = self._processes[address]
        there, back = (source.name, target.name), (target.name, source.name)
        await asyncio.sleep(self._link(*there).delay() + self._link(*back).delay())
        shut = target.silent or self.is_cut(*there) or self.is_cut(*back)
        return not (target.alive or shut)

    def _send(
        self,
        source: Process,
        target: Process,
        request: network.Request[Process],
        frames: wire.Frames,
        arrive: Callable[[], None],
        back: bool = False,
    ) -> None:
        """Send a message, unless it is lost."""
        ends = (source.name, target.name)
        name = type(request.message).__name__ + (" reply" if back else "")
        link = self._link(*ends)
        delay = link.delay()
        lost = self.weather.loss.get(request.link, 0.0)
        if self._lossy:
            lost = max(lost, self._lossy.get(ends, 0.0))
        if self._cut.get(ends, 0) > 0:  # Counter's [] is slow for missing keys
            self.note("cut", *ends, name)
            return
        if link.random.random() < lost:
            self.note("lost", *ends, name)
            if link.random.random() < 0.5:
                self.later(delay, refuse, request.reply)
            return
        self.note("sent", *ends, name)
        self.later(delay, unless_torn, source, link, arrive)
        if not back:
            self._perhaps_again(source, target, name, arrive)
            self._perhaps_late(source, target, name, arrive)

    def _perhaps_again(
        self, source: Process, target: Process, name: str, arrive: Callable[[], None]
    ) -> None:
        """Deliver some requests a second time; the second reply is ignored."""
        link = self._link(source.name, target.name)
        if link.random.random() < self.weather.duplicated:
            self.note("sent again", source.name, target.name, name)
            self.later(link.delay() + link.delay(), unless_torn, source, link, arrive)

    def _perhaps_late(
        self, source: Process, target: Process, name: str, arrive: Callable[[], None]
    ) -> None:
        """Deliver some requests again, when either end may have left."""
        echoing = self._echoing
        if echoing and (echoing[source.name] > 0 or echoing[target.name] > 0):
            random = self._link(source.name, target.name).random
            if random.random() < ECHOED:
                self.note("late", source.name, target.name, name)
                self.later(random.uniform(*LATE), arrive)

    def _mean_delay(self, random: Random) -> float:
        shortest, longest = self.weather.delays
        return float(shortest * (longest / shortest) ** random.random())

    def _ended(
        self, process: dps.virtual.loop.Process, task: asyncio.Task[Any]
    ) -> BaseException | None:
        error = super()._ended(process, task)
        if isinstance(error, Violation):
            self.report(error)
        elif error is not None and not isinstance(error, DpsError | Unforeseen):
            self.bugs.append(error)
            self.report(Violation("bug", f"in {process.name}: {error!r}"))
        return error


class _Request(network.Request[Process]):
    __slots__ = ()

    network: Network

    def arrive(self) -> None:
        """Start the request at its target; it may arrive more than once."""
        target = self.target
        if not target.alive and target.silent:
            return
        if target.alive and self.network.reads_late and target.paused_at is not None:
            target.unread.append(self.arrive)
            return
        super().arrive()

    async def carry_out(self) -> Any:
        """Return the reply of the target."""
        network, target, message = self.network, self.target, self.message
        frames = await super().carry_out()
        if self.link == "train" or type(message) is RenewLease:
            network.on_answer(target, message, frames)
        return frames


class Courier:
    """Encodes messages for the wire and decodes them.

    Most are short and identical to earlier ones: leases, tables, acknowledgements. Their encoded
    form is cached, and immutable messages are returned again.
    """

    def __init__(self) -> None:
        self._encoded: dict[Any, wire.Frames] = {}
        self._decoded: dict[bytes, Any] = {}

    def encode(self, message: Any) -> wire.Frames:
        """Return read-only frames: a sender cannot change a message on the wire."""
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
        """Return the message of these frames; raise the error if they carry one."""
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

    def begin(
        self, to: Endpoint, message: Any, deadline: float, link: str, done: Done
    ) -> Callable[[], None]:
        """Send a message, as if there were a connection (see `Transport`)."""

        async def bring() -> None:
            try:
                end(await self.call(to, message, deadline, link))
            except Exception as error:  # noqa: BLE001 - the caller gets any error
                end(error)

        def end(reply: Any) -> None:
            if waiting:
                waiting.clear()
                done(reply)

        waiting = [asyncio.create_task(bring())]
        return partial(end, TimeoutError())

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return an array to send (see `dps.protocol.transport.Transport`), in any memory."""
        return np.empty(shape, dtype)

    async def gone(self, address: str) -> bool:
        """Whether the process at the address is known to have ended; a cut hides its end."""
        return await self._network.probe(self._process, address)


def _unheard(process: Process, message: Any, frames: wire.Frames) -> None:
    pass


def run(main: Callable[[], Coroutine[Any, Any, T]], random: Random, work: float = 0.02) -> T:
    """Run a coroutine, and whatever it starts, on a `VirtualLoop`; return its result.

    `Deadlock` if it waits for an event that can never occur.
    """
    loop = VirtualLoop(random, work)
    loop.set_exception_handler(only_errors)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            return runner.run(main())
        finally:
            loop.resume_all()  # so that everything can be cancelled
