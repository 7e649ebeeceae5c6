"""The network between virtual nodes: it transports frames unchanged and models the time it takes.

The delay of a message is drawn from the link's own seeded generator, so it does not depend on
messages on other links. When a process crashes, all its tasks end, and no message that they send
during cancellation leaves the process. Messages of a paused process arrive; messages to it wait.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import AbstractEventLoop, TimerHandle
from collections import defaultdict
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Generic

from dps.errors import DpsError, Unreachable
from dps.protocol import wire
from dps.protocol.transport import Endpoint
from dps.virtual.loop import P, Process, VirtualLoop, fulfil, here
from dps.virtual.profile import Profile

Reply = asyncio.Future[wire.Frames | None]  # None: the connection was refused or lost

PORT = 8700
PER_NET = 250
APPLIED = ("train", "replicate")  # links whose requests carry gradients
SMALL_BYTES = 1 << 14  # smaller messages pass between others, as packets do


@dataclass(slots=True, eq=False)
class _Transfer:
    source: str
    target: str
    left: float
    delay: float
    done: Callable[[], None]
    rate: float
    since: float
    timer: TimerHandle | None = None


class Ports:
    """One outgoing and one incoming port for each host. Transfers run in the `context`."""

    def __init__(self, loop: AbstractEventLoop, bandwidth: float, context: Context) -> None:
        self._loop = loop
        self._bandwidth = bandwidth
        self._context = context
        self._out: dict[str, dict[_Transfer, None]] = defaultdict(dict)
        self._in: dict[str, dict[_Transfer, None]] = defaultdict(dict)

    def send(
        self, source: str, target: str, nbytes: int, delay: float, done: Callable[[], None]
    ) -> None:
        """Send bytes; call `done` `delay` seconds after the last one has passed both ports."""
        if nbytes < SMALL_BYTES or math.isinf(self._bandwidth):
            self._later(nbytes / self._bandwidth + delay, done)
            return
        now = self._loop.time()
        transfer = _Transfer(source, target, nbytes, delay, done, 0.0, now)
        self._out[source][transfer] = self._in[target][transfer] = None
        self._share(source, target)

    def _share(self, source: str, target: str) -> None:
        now = self._loop.time()
        for transfer in {**self._out[source], **self._in[target]}:
            transfer.left -= transfer.rate * (now - transfer.since)
            sharing = max(len(self._out[transfer.source]), len(self._in[transfer.target]))
            transfer.rate, transfer.since = self._bandwidth / sharing, now
            if transfer.timer is not None:
                transfer.timer.cancel()
            left = max(0.0, transfer.left) / transfer.rate
            transfer.timer = self._later(left, self._arrived, transfer)

    def _arrived(self, transfer: _Transfer) -> None:
        del self._out[transfer.source][transfer], self._in[transfer.target][transfer]
        transfer.timer = None  # breaks a reference cycle that would keep the bytes alive
        self._share(transfer.source, transfer.target)
        self._later(transfer.delay, transfer.done)

    def _later(self, seconds: float, call: Callable[..., None], *args: object) -> TimerHandle:
        return self._loop.call_later(seconds, call, *args, context=self._context)


@dataclass(slots=True)
class Link:
    """One direction between two names; `mean` is its mean delay."""

    random: Random
    mean: float

    def delay(self) -> float:
        """Draw the delay of a message: half of the mean or more, so messages may overtake."""
        return self.mean * (0.5 + self.random.expovariate(2.0))


class Network(Generic[P]):
    """Connects the processes of one virtual cluster, each on its own host. Used from its loop."""

    def __init__(self, random: Random, profile: Profile, make: Callable[[str, str], P]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop = loop
        self._loop.set_task_factory(self._task)
        self._seed = random.getrandbits(64)
        self.nowhere = copy_context()  # of work that belongs to no process: messages in transit
        self.requests: Callable[..., Request[P]] = Request  # delivers a request to its target
        self._make = make  # creates a process from its name and address
        self._latency = profile.link.latency
        self._service = profile.service
        self._ports = Ports(loop, profile.link.bandwidth, self.nowhere)
        self._free_at: dict[str, float] = defaultdict(float)
        self.busy: dict[str, float] = defaultdict(float)  # seconds with messages, by address
        self._processes: dict[str, P] = {}
        self._links: dict[tuple[str, str], Link] = {}

    def process(self, name: str) -> P:
        """Start an empty process at a new address."""
        process = self._make(name, self._address(name, len(self._processes)))
        self._processes[process.address] = process
        return process

    def _address(self, name: str, number: int) -> str:
        return f"tcp://10.0.{number // PER_NET}.{number % PER_NET + 1}:{PORT}"

    # -- faults ----------------------------------------------------------------------------------

    def crash(self, process: P) -> None:
        """End a process at once: its memory is lost, and pending requests to it soon fail."""
        process.alive = False
        for task in process.tasks:
            task.cancel()
        self.resume(process)
        self._refuse_all(process)

    def _refuse_all(self, process: P) -> None:
        for reply in process.expected:
            self.later(self._link(process.name, process.name).delay(), refuse, reply)

    def pause(self, process: P) -> None:
        """Stop a process until it is resumed; messages to it wait."""
        if process.paused_at is None and process.alive:
            process.paused_at = self._loop.time()
            self._loop.pause(process)

    def resume(self, process: P) -> None:
        """Continue a paused process."""
        if process.paused_at is not None:
            process.stood += self._loop.time() - process.paused_at
            process.paused_at = None
            self._loop.resume(process)

    # -- messages --------------------------------------------------------------------------------

    async def ask(
        self, source: P, to: Endpoint, link: str, message: Any, frames: Any, deadline: float | None
    ) -> wire.Frames:
        """Send a request to its service; return the reply, or raise `TimeoutError`."""
        if not source.alive:
            raise asyncio.CancelledError  # a dead process sends nothing
        if to.address not in self._processes:
            raise Unreachable(f"no process listens at {to.address}")
        target = self._processes[to.address]
        reply: Reply = self._loop.create_future()
        target.expected[reply] = None
        request = self.requests(self, source, target, to.key, link, message, frames, reply)
        # `asyncio.timeout` would cancel the task, and cost as much time as the rest of a message.
        timer = None if deadline is None else self._loop.call_later(deadline, request.expire)
        try:
            self._send(source, target, request, frames, request.arrive)
            answered = await reply
            if request.expired:  # a process that was paused may find a late reply
                raise TimeoutError
            if answered is None:
                raise Unreachable(f"the connection to {target.name} was refused or lost")
            return answered
        finally:
            if timer is not None:
                timer.cancel()
            del target.expected[reply]

    def _send(
        self,
        source: P,
        target: P,
        request: Request[P],
        frames: Any,
        arrive: Callable[[], None],
        back: bool = False,
    ) -> None:
        """Send a request, or with `back` a reply."""
        link = self._link(source.name, target.name)
        delay = link.delay()
        nbytes = 0 if isinstance(frames, BaseException) else wire.size(frames)
        takes = self._service.message + nbytes * self._service.byte
        if request.link in APPLIED and not back:
            takes += nbytes * self._service.update
        taken_in = partial(self._take_in, target, takes, partial(unless_torn, source, link, arrive))
        self._ports.send(source.address, target.address, nbytes, delay, taken_in)

    def _take_in(self, target: P, takes: float, arrive: Callable[[], None]) -> None:
        if not takes:
            arrive()
            return
        now, address = self._loop.time(), target.address
        ready = self._free_at[address] = max(now, self._free_at[address]) + takes
        self.busy[address] += takes
        self.later(ready - now, arrive)

    async def serve(self, target: P, key: str, link: str, frames: wire.Frames) -> Any:
        """Execute a request at its target; return the reply or the error."""
        service: Any = target.services.get(key)
        if service is None:
            return KeyError(key)
        try:
            return await service(link, frames)
        except (DpsError, OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
            return error

    async def probe(self, source: P, address: str) -> bool:
        """Whether a connection from `source` to the process at an address would be refused."""
        target = self._processes[address]
        there, back = (source.name, target.name), (target.name, source.name)
        await asyncio.sleep(self._link(*there).delay() + self._link(*back).delay())
        return not target.alive

    async def refuses(self, host: str, port: int) -> bool:
        """Whether no process listens there, as seen by the current process."""
        address, source = f"tcp://{host}:{port}", here.get()
        if address not in self._processes or source is None:
            return True
        return await self.probe(self._processes[source.address], address)

    def later(self, delay: float, callback: Callable[..., None], *args: Any) -> None:
        """Call a function after some seconds, even if the current process is stopped or ended."""
        self._loop.call_later(delay, callback, *args, context=self.nowhere)

    def _link(self, source: str, target: str) -> Link:
        link = self._links.get((source, target))
        if link is None:
            # One generator per link: an additional message on one link does not affect the others.
            random = Random(f"{self._seed} {source} {target}")
            link = self._links[source, target] = Link(random, self._mean_delay(random))
        return link

    def _mean_delay(self, random: Random) -> float:
        return self._latency

    def _task(
        self, loop: asyncio.AbstractEventLoop, work: Any, *, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
        process = here.get() if context is None else context.get(here)
        if process is not None:
            process.tasks[task] = None
            task.add_done_callback(partial(self._ended, process), context=self.nowhere)
        return task

    def _ended(self, process: Process, task: asyncio.Task[Any]) -> BaseException | None:
        """Remove a task; return its error, so that asyncio does not report it as unretrieved."""
        del process.tasks[task]
        return None if task.cancelled() else task.exception()


@dataclass(slots=True, eq=False)
class Request(Generic[P]):
    """A request in transit and its reply, in no reference cycle, so it needs no collector."""

    network: Network[P]
    source: P
    target: P
    key: str
    link: str
    message: Any
    frames: wire.Frames
    reply: Reply
    expired: bool = False

    def arrive(self) -> None:
        """Start the request at its target; it may arrive more than once."""
        if self.target.alive:
            self.target.run(self.carry_out()).add_done_callback(self._answer)
        else:
            refuse(self.reply)

    async def carry_out(self) -> Any:
        """Return the reply of the target."""
        return await self.network.serve(self.target, self.key, self.link, self.frames)

    def expire(self) -> None:
        """Stop waiting for the reply."""
        self.expired = True
        fulfil(self.reply, [])

    def _answer(self, serving: asyncio.Task[wire.Frames]) -> None:
        if serving.cancelled() or serving.exception() is not None:
            return
        frames = serving.result()
        arrive = partial(fulfil, self.reply, frames)
        self.network._send(self.target, self.source, self, frames, arrive, back=True)


def carried(frames: wire.Frames) -> wire.Frames:
    """Return frames on the wire: read-only, and copies unless they are bytes, as headers are."""
    sent = [frame if isinstance(frame.base, bytes) else frame.copy() for frame in frames]
    for frame in sent:
        frame.setflags(write=False)
    return sent


def unless_torn(source: Process, link: Link, arrive: Callable[[], None]) -> None:
    """Deliver a message, unless its sender has crashed; then deliver it with probability 0.5."""
    if source.alive or link.random.random() < 0.5:
        arrive()


def refuse(reply: Reply) -> None:
    """Fail a pending reply: the connection was refused or lost."""
    fulfil(reply, None)
