"""Owns simulated processes and the network between them: delays, losses, partitions and crashes.

A message is encoded as it is on a real wire, travels for a time drawn from the seeded generator,
and is decoded at the other end, so nothing is shared between processes but what they send. Every
task knows the process that it runs in (by a context variable, which tasks inherit); when the
process crashes they all end, and nothing that they do on their way out leaves the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, TypeVar

from dps.errors import DeadlineExceeded, DpsError, NotServing, Unreachable
from dps.protocol import wire
from dps.protocol.transport import Endpoint

T = TypeVar("T")

EPOCH_SECONDS = 1e9  # what the clocks show when a simulation begins

_here: ContextVar[Process] = ContextVar("process")


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
    never_lost
        Names of messages that are not lost.
    """

    delays: tuple[float, float] = (0.0002, 0.005)
    loss: dict[str, float] = field(default_factory=dict)
    never_lost: tuple[str, ...] = ()

    def fraction_lost(self, link: str, name: str) -> float:
        """How likely it is that a message of that link kind and name is lost."""
        return 0.0 if name in self.never_lost else self.loss.get(link, 0.0)


class Process:
    """A simulated process: its memory is the objects in it, which nobody else may touch."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.alive = True
        self.services: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.expected: dict[asyncio.Future[wire.Frames], None] = {}

    def do(self, function: Callable[[], T]) -> T:
        """Call a function as this process: the tasks that it makes belong to it."""
        return self._context().run(function)

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task in this process."""
        return asyncio.get_running_loop().create_task(work, context=self._context())

    def _context(self) -> Context:
        context = copy_context()
        context.run(_here.set, self)
        return context


class Network:
    """Connects processes. Used from one virtual event loop.

    Attributes
    ----------
    trace
        Everything that was sent, lost or crashed, with its time.
    bugs
        Errors that ended a task and are not dps's own.
    """

    def __init__(self, random: Random, weather: Weather) -> None:
        self.trace: list[tuple[float, str, str, str, str]] = []
        self.bugs: list[BaseException] = []
        self.weather = weather
        self._random = random
        self._loop = asyncio.get_running_loop()
        self._loop.set_task_factory(self._task)
        self._processes: dict[str, Process] = {}
        self._means: dict[tuple[str, str], float] = {}
        self._cut: set[tuple[str, str]] = set()

    def process(self, name: str) -> Process:
        """Start an empty process, at an address that none had before."""
        process = Process(name, f"sim://{name}/{len(self._processes)}")
        self._processes[process.address] = process
        return process

    def crash(self, process: Process) -> None:
        """End a process at once: its memory is lost, and whoever waits for it learns of it soon."""
        self.note("crash", process.name, "", "")
        process.alive = False
        for task in process.tasks:
            task.cancel()
        for reply in process.expected:
            self._loop.call_later(self._delay(process, process), _refuse, reply, process.name)

    def cut(self, source: str, target: str) -> None:
        """Lose whatever the processes of one name send to those of another, in this direction."""
        self._cut.add((source, target))

    def slow(self, source: str, target: str, mean: float) -> None:
        """Set the mean delay of messages from the processes of one name to those of another."""
        self._means[source, target] = mean

    def heal(self) -> None:
        """Undo every cut."""
        self._cut.clear()

    def note(self, what: str, source: str, target: str, message: str) -> None:
        """Add a line to the trace."""
        self.trace.append((round(self._loop.time(), 9), what, source, target, message))

    async def ask(
        self, source: Process, to: Endpoint, link: str, name: str, frames: wire.Frames
    ) -> wire.Frames:
        """Bring a request to its service and the reply back; may never return."""
        if not source.alive:
            raise asyncio.CancelledError  # a dead process sends nothing
        target = self._processes[to.address]
        reply: asyncio.Future[wire.Frames] = self._loop.create_future()
        target.expected[reply] = None

        def arrive() -> None:
            if not target.alive:
                return _refuse(reply, target.name)
            serving = target.run(_serve(target, to.key, frames))
            serving.add_done_callback(answer)

        def answer(serving: asyncio.Task[wire.Frames]) -> None:
            if not serving.cancelled() and serving.exception() is None:
                back = partial(_fulfil, reply, _sealed(serving.result()))
                self._send(target, source, f"{name} reply", link, reply, back)

        try:
            self._send(source, target, name, link, reply, arrive)
            return await reply
        finally:
            del target.expected[reply]

    async def probe(self, source: Process, address: str) -> bool:
        """Whether a connection from `source` to the process at an address would be refused."""
        target = self._processes[address]
        await asyncio.sleep(self._delay(source, target) + self._delay(target, source))
        cut = {(source.name, target.name), (target.name, source.name)} & self._cut
        return not target.alive and not cut

    def _send(
        self,
        source: Process,
        target: Process,
        name: str,
        link: str,
        reply: asyncio.Future[wire.Frames],
        arrive: Callable[[], None],
    ) -> None:
        delay = self._delay(source, target)
        if (source.name, target.name) in self._cut:
            self.note("cut", source.name, target.name, name)
        elif self._random.random() < self.weather.fraction_lost(link, name):
            self.note("lost", source.name, target.name, name)
            if self._random.random() < 0.5:
                self._loop.call_later(delay, _refuse, reply, target.name)
        else:
            self.note("sent", source.name, target.name, name)
            self._loop.call_later(delay, self._unless_torn, source, arrive)

    def _unless_torn(self, source: Process, arrive: Callable[[], None]) -> None:
        """Half of what a process was sending when it crashed had not left it."""
        if source.alive or self._random.random() < 0.5:
            arrive()

    def _task(
        self, loop: asyncio.AbstractEventLoop, work: Any, *, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """Make a task and enter it in the process that it runs in."""
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
        process = (context or copy_context()).get(_here)
        if process is not None:
            process.tasks[task] = None
            task.add_done_callback(partial(self._ended, process))
        return task

    def _ended(self, process: Process, task: asyncio.Task[Any]) -> None:
        del process.tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, DpsError):
            self.bugs.append(error)

    def _delay(self, source: Process, target: Process) -> float:
        link = (source.name, target.name)
        if link not in self._means:
            shortest, longest = self.weather.delays
            self._means[link] = shortest * (longest / shortest) ** self._random.random()
        return self._means[link] * (0.5 + self._random.expovariate(2.0))


class SimTransport:
    """Calls from one process to others (see `dps.protocol.transport.Transport`)."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    async def call(self, to: Endpoint, message: Any, deadline: float, link: str = "control") -> Any:
        """Send a message and return the reply."""
        name = type(message).__name__
        frames = _sealed(wire.encode(message))
        try:
            async with asyncio.timeout(deadline):
                reply = await self._network.ask(self._process, to, link, name, frames)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{name} to {to.key} at {to.address}: no reply in {deadline:g} s"
            ) from None
        return wire.decode(reply)

    async def gone(self, address: str) -> bool:
        """Whether the process at the address has ended; what a cut keeps from us is not known."""
        return await self._network.probe(self._process, address)


class SimClock:
    """The virtual time, as the clock of a process shows it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        """Seconds since the Unix epoch, in the simulated world."""
        return EPOCH_SECONDS + self._loop.time()

    def monotonic(self) -> float:
        """Seconds since the simulation began."""
        return self._loop.time()


async def _serve(process: Process, key: str, frames: wire.Frames) -> wire.Frames:
    try:
        if key not in process.services:
            raise NotServing(f"there is no {key} at {process.address}")
        return wire.encode(await process.services[key](wire.decode(frames)))
    except DpsError as error:
        return wire.encode(error)


def _sealed(frames: wire.Frames) -> wire.Frames:
    """Copies that nobody can write to: what is on the wire is out of the sender's hands."""
    copies = [frame.copy() for frame in frames]
    for copy in copies:
        copy.setflags(write=False)
    return copies


def _fulfil(reply: asyncio.Future[wire.Frames], frames: wire.Frames) -> None:
    if not reply.done():
        reply.set_result(frames)


def _refuse(reply: asyncio.Future[wire.Frames], name: str) -> None:
    if not reply.done():
        reply.set_exception(Unreachable(f"the connection to {name} was refused or lost"))
