"""A member of a group on a node: access of every actor and worker to its process, and its end.

A node leaves after a SIGTERM, or near the end of its lifetime (`dask worker --lifetime`). Dask
alone would end the process, with its shards, at once or at the end of the lifetime. So the node
reports earlier to the groups that use it, and serves until they have moved everything away
(`dps.cluster.driver.shard_hosts`). A second SIGTERM, and the end of the lifetime, end it as they
would without dps.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
from distributed import Client, get_worker

from dps.cluster.liveness import presence_of
from dps.cluster.names import KEY_PREFIX, topic
from dps.cluster.node.logs import Recorder, sample
from dps.cluster.platform import SYSTEM, keep_memory, made_once, platform_of
from dps.cluster.transport.calls import ClusterTransport, Meter, links_of
from dps.cluster.transport.port import port_of
from dps.events import Connected, NodeJoined, ResourceSampled
from dps.protocol.tasks import Tasks, task_failed

if TYPE_CHECKING:
    import distributed

    from dps.protocol.group import Group

T = TypeVar("T")

NAME = "dps-leave"
RELEASE_SECONDS = 0.5  # between looks whether an actor is released
LOOK_SECONDS = 0.1
LOOKS = 3  # consecutive ones that must find the node empty: a task may be on its way
MIN_MARGIN, MAX_MARGIN = 60.0, 600.0


def margin(lifetime: float) -> float:
    """Return how many seconds before the end of its lifetime a node begins to leave."""
    # Another job may start in this time.
    return min(max(MIN_MARGIN, lifetime / 10), MAX_MARGIN, lifetime / 2)


class Leave:
    """Whether one node has to leave. Used from the event loop of its process."""

    def __init__(self, dask_worker: distributed.Worker) -> None:
        self.why: str | None = None  # "signal" or "lifetime"; None: it stays. For any thread.
        self._worker = dask_worker
        self._loop = asyncio.get_running_loop()
        self._users: Counter[str] = Counter()
        self._handlers: dict[int, Any] = {}  # of signals, before ours
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    def enter(self, group: str) -> None:
        """Add a user of a group, which is informed if the node has to leave."""
        if not self._users:
            self._listen()
        self._users[group] += 1
        if self.why is not None:
            self._report(group, self.why)

    def exit(self, group: str) -> None:
        """Remove a user of a group."""
        self._users[group] -= 1
        self._users += Counter()  # removes counts of 0
        if self._users or self.why is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        for number, before in list(self._handlers.items()):  # a signal may remove one
            signal.signal(number, before)
        self._handlers.clear()

    def _listen(self) -> None:
        lifetime = self._worker.lifetime
        if lifetime:
            ends = psutil.Process().create_time() + lifetime
            until = max(0.0, ends - margin(lifetime) - time.time())
            self._timer = self._loop.call_later(until, self._leave, "lifetime")
        # A user's own program, which may have Dask workers in its process, keeps its signals.
        is_main = threading.current_thread() is threading.main_thread()
        if platform_of(self._worker) is SYSTEM and is_main and not Client._instances:
            self._install(signal.SIGTERM, self._signalled)
            if self._worker.nanny:
                # Ctrl-C reaches every process of a terminal, and of a notebook. The driver decides
                # what follows: the interrupted cell may only show the progress.
                self._install(signal.SIGINT, signal.SIG_IGN)

    def _install(self, number: int, handler: Any) -> None:
        # None: it was not set from Python.
        self._handlers[number] = signal.signal(number, handler) or signal.SIG_DFL

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        # Runs between any two instructions of the main thread: it must not log or send.
        signal.signal(number, self._handlers.pop(number, signal.SIG_DFL))
        self._loop.call_soon_threadsafe(self._leave, "signal")

    def _leave(self, why: str) -> None:
        if self.why is None:
            self.why = why
            for group in self._users:
                self._report(group, why)
            self._ending = self._loop.create_task(self._end_when_empty(tuple(self._users)))

    def _report(self, group: str, what: str) -> None:
        message = {"address": self._worker.address, "what": what}
        self._worker.log_event(topic("leaving", group), message)

    async def _end_when_empty(self, groups: tuple[str, ...]) -> None:
        state, looks = self._worker.state, 0
        while looks < LOOKS:
            await asyncio.sleep(LOOK_SECONDS)
            used = self._users or state.actors or state.executing or state.long_running
            looks = 0 if used else looks + 1
        for group in groups:
            self._report(group, "left")
        # Dask moves the results of finished tasks to other nodes before that.
        await self._worker.close_gracefully(reason="dps-node-leaving")


def leave_of(dask_worker: distributed.Worker) -> Leave:
    """Return the `Leave` of a node's process; the first call must be on its event loop."""
    return made_once(dask_worker, NAME, lambda: Leave(dask_worker))


class Member:
    """The transport, records and background tasks of one actor or worker."""

    # In any thread of the node; methods other than `begin` belong to the node's event loop.
    def __init__(self, group: Group, node: str, role: str, meter: Meter) -> None:
        self.dask_worker = get_worker()
        self.platform = platform_of(self.dask_worker)
        keep_memory(self.platform)
        self.clock = self.platform.clock
        self.node = node
        self.meter = meter
        self.recorder = Recorder(group, self.dask_worker.log_event)
        self.presence = presence_of(self.dask_worker)
        self.port = port_of(self.dask_worker)
        self.links = links_of(self.dask_worker)
        self.tasks = Tasks(lambda error: self.recorder(task_failed(self.clock, node, error)))
        self.stored: Callable[[], int] = lambda: 0  # the bytes that it stores for others
        self.flush: Callable[[], None] = lambda: None
        self._role = role
        self._group = group
        self.transport = ClusterTransport(
            self.dask_worker.rpc,
            meter,
            self.links,
            self.port if group.transport != "dask" else None,
            group.transport,
            lambda *peer: self.recorder(Connected(self.clock.now(), node, *peer)),
        )

    def begin(self, request: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the node's event loop; any thread may wait for the future."""
        return self.platform.begin(request, self.dask_worker.loop.asyncio_loop)

    def begin_at_once(
        self, attempt: Callable[[Future[T]], bool], request: Callable[[], Coroutine[Any, Any, T]]
    ) -> Future[T]:
        """Call `attempt` on the node's event loop or, if that returns False, start a coroutine."""
        return self.platform.begin_at_once(attempt, request, self.dask_worker.loop.asyncio_loop)

    def enter(self) -> None:
        """Use the node until `exit`: until then it is watched, and does not end."""
        leave_of(self.dask_worker).enter(self._group.name)
        self.presence.enter(self._group.name)
        self.port.enter()
        process = self.platform.pid, self.platform.host, self.platform.started
        self.recorder(NodeJoined(self.clock.now(), self.node, self._role, *process))

    def record(self, flush: Callable[[], None]) -> None:
        """Send recorded events every `Timings.flush` seconds, after a call of `flush`."""
        every, self.flush = self._group.timings.flush, flush
        self.tasks.keep(partial(self.recorder.send_forever, every, self.measure, flush), every)

    def measure(self) -> ResourceSampled:
        """Measure what the process has used."""
        return sample(self.node, self._role, self.meter, self.platform, self.stored())

    async def exit(self) -> None:
        """End the background tasks, send the last events and stop using the node."""
        await self.tasks.close()
        self.flush()
        self.recorder(self.measure())
        self.recorder.send()
        self.port.exit()
        self.presence.exit(self._group.name)
        leave_of(self.dask_worker).exit(self._group.name)

    async def finish_when_released(self, key: str, finish: Callable[[], Awaitable[None]]) -> None:
        """Call `finish` when no client holds the actor's future, as when the driver was killed."""
        while key in self.dask_worker.state.tasks:
            await asyncio.sleep(RELEASE_SECONDS)
        await finish()


# -- what a killed driver leaves on a Dask worker that outlives it ---------------------------------
# Its group ends without it: the coordinator closes it, actors finish when they are released, and
# training functions end at their next request. The next user of the Dask worker waits for that.


async def occupied(dask_worker: distributed.Worker) -> bool:
    """Whether anything of dps still runs on a Dask worker."""
    return any(str(key).startswith(KEY_PREFIX) for key in dask_worker.state.tasks)


async def tidy(dask_worker: distributed.Worker) -> None:
    """Revert the faults that remain: disturbed links, and a limit of 0 on the size of files."""
    links_of(dask_worker).lift_all()
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
