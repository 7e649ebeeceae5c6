"""The processes of a virtual cluster as dps knows them: Dask workers, and the scheduler.

Each provides what dps uses of the real one, and no more. An actor or a task in it runs in its
simulated process: it ends with the process, and stands still while that is paused.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, Generic, Literal, TypeVar

from distributed import Security
from distributed.worker import _worker_cvar
from greenlet import GreenletExit, getcurrent

from dps.cluster.names import NodeSpec
from dps.cluster.platform import Platform, Running, settle
from dps.cluster.transport.calls import frozen, thawed
from dps.errors import Unreachable
from dps.protocol import wire
from dps.protocol.messages import Sighted
from dps.protocol.monitor import Look, Monitor, Sighting
from dps.protocol.tasks import Tasks
from dps.protocol.transport import Endpoint, TransportChoice, Watched
from dps.virtual.loop import P, Process, VirtualClock
from dps.virtual.network import Network, carried
from dps.virtual.threads import BlockingLoop, VirtualFlag, VirtualFuture, VirtualThread

T = TypeVar("T")

FIRST_PID = 100
LOOK_SECONDS = 0.2
NAME = "virtual"  # of the monitor


@dataclass(frozen=True)
class Shared:
    """State that all processes of a virtual cluster share."""

    loop: BlockingLoop
    network: Network[Process]
    emit: Callable[[Process, str, Any], None]  # delivers an event to the handlers of its topic
    disk: str  # the path of the disk of all nodes
    monitor: VirtualMonitor[Process]
    numbers: Iterator[int] = field(default_factory=lambda: count(FIRST_PID))  # process ids
    tokens: Iterator[int] = field(default_factory=count)  # of names


class VirtualPlatform(Platform):
    """The platform of one process on virtual time. Not thread-safe: there is one thread."""

    kills = (GreenletExit, KeyboardInterrupt)  # Ctrl-C arrives in any part of the only thread
    started = 0.0  # no two virtual processes have the same number
    pid = 0
    host = ""

    def __init__(self, shared: Shared, process: Process) -> None:
        self.presence = VirtualPresence(shared.monitor, process)
        self.clock = VirtualClock(shared.loop)
        self.pid = next(shared.numbers)
        self.host = f"host-of-{process.name}"
        self._shared = shared
        self._loop = shared.loop
        self._process = process

    def usage(self) -> tuple[float, int]:
        """The time that its messages took, as the profile has it; memory is not modelled."""
        return self._shared.network.busy[self._process.address], 0

    def token(self) -> str:
        """Return eight characters for a name: unique, and the same ones in each run."""
        return f"{next(self._shared.tokens):08x}"

    def monitors(
        self, on_report: Callable[[Any], Awaitable[object]], on_failure: Callable[[Exception], None]
    ) -> VirtualLinks:
        """Return the coordinator's connection to the monitor of all virtual nodes."""
        return VirtualLinks(self._shared.monitor, on_report, on_failure)

    def way(self, chosen: TransportChoice) -> TransportChoice:
        """Return "dask", because there are no sockets."""
        return "dask"

    def place(self, path: str | None) -> str | None:
        """Return the place of a path on the disk in memory."""
        disk = self._shared.disk
        if path is not None and path.startswith(disk):
            return path
        return f"{disk}/{(path or 'checkpoints').replace('://', '/').strip('/')}"

    def begin(self, request: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> Future[T]:
        """Start a coroutine; waiting for the future lets virtual time pass."""
        current = getcurrent()
        if isinstance(current, VirtualThread) and current.killed:
            request.close()
            raise GreenletExit
        future: VirtualFuture[T] = VirtualFuture(self._loop)
        self._loop.create_task(request).add_done_callback(partial(settle, future))
        return future

    def begin_at_once(
        self,
        attempt: Callable[[Future[T]], bool],
        request: Callable[[], Coroutine[Any, Any, T]],
        loop: asyncio.AbstractEventLoop,
    ) -> Future[T]:
        """Start a coroutine, as `begin` does: there are no connections without tasks here."""
        return self.begin(request(), loop)

    def sleep(self, seconds: float) -> None:
        """Let `seconds` of virtual time pass."""
        self._loop.wait(lambda wake: None, max(0.0, seconds))

    def flag(self) -> VirtualFlag:
        """Return something to wait for, which is not set."""
        return VirtualFlag(self._loop)

    def start(self, work: Callable[[], object], name: str) -> Running:
        """Start work in the background; an error of it is logged."""
        thread = VirtualThread(work, self._loop, self._process)
        thread.future.add_done_callback(self._report_failure)
        return thread

    def wait(
        self, client: Any, futures: Sequence[Any], timeout: float, every: bool = False
    ) -> bool:
        """Wait for the first of some futures, or `every` one; False after `timeout` seconds."""
        until = self._loop.time() + timeout
        while True:
            left = [future for future in futures if not future.done()]
            if not left or (len(left) < len(futures) and not every):
                return True
            if self._loop.time() >= until:
                return False
            self._loop.wait(partial(_subscribe, left), until - self._loop.time())

    def at_once(self, work: Callable[[str], T], names: Sequence[str]) -> list[T]:
        """Call a function with several names at the same time."""
        threads = [VirtualThread(partial(work, name), self._loop, self._process) for name in names]
        return [thread.future.result() for thread in threads]

    def _report_failure(self, future: Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            context = {"message": "background work failed", "exception": error}
            self._loop.call_exception_handler(context)


def _subscribe(futures: Sequence[Any], wake: Callable[..., None]) -> None:
    for future in futures:
        future.add_done_callback(wake)


class VirtualMonitor(Generic[P]):
    """Watches simulated processes, and may `kill` them. Used from their loop."""

    def __init__(self, kill: Callable[[P], object]) -> None:
        self._kill = kill
        self._state = Monitor()
        self._processes: dict[int, P] = {}
        self._loop = asyncio.get_running_loop()

    def add(self, process: P) -> int:
        """Watch a process; return its number."""
        number = self._state.add(may_be_killed=True)
        self._processes[number] = process
        return number

    def remove(self, number: int) -> None:
        """Stop watching a process."""
        self._state.remove(number)
        self._processes.pop(number, None)

    def silence(self, number: int, seconds: float) -> None:
        """Report nothing about a process for a while."""
        self._state.silence(number, self._loop.time() + seconds)

    def look(self) -> list[Sighting]:
        """Look at all processes, and remove those that have ended."""
        for number in [n for n, process in self._processes.items() if not process.alive]:
            self.remove(number)
        return self._state.look(self._loop.time(), self._look_at)

    def kill(self, number: int, stopped: float) -> None:
        """Kill a process that has been stopped for `stopped` seconds, and still is."""
        now, process = self._loop.time(), self._processes.get(number)
        if process and self._state.may_kill(number, now, self._look_at(number), stopped):
            self._kill(process)

    def _look_at(self, number: int) -> Look:
        process = self._processes[number]
        return Look("stopped", process.stood) if process.is_stopped else Look("no", None)


class VirtualPresence:
    """The registration of a virtual process (see `dps.cluster.liveness.NodePresence`)."""

    def __init__(self, monitor: VirtualMonitor[Process], process: Process) -> None:
        self.watched: Watched | None = None
        self._monitor = monitor
        self._process = process

    def enter(self, group: str) -> None:
        """Register, if this is the first use of the process."""
        if self.watched is None:
            self.watched = Watched(NAME, self._monitor.add(self._process))

    async def registered(self) -> None:
        """Return at once: `enter` has registered it."""

    def exit(self, group: str) -> None:
        """Stay registered until the process ends."""

    def silence(self, seconds: float) -> None:
        """Make the monitor report nothing about this process for a while."""
        if self.watched is not None:
            self._monitor.silence(self.watched.number, seconds)


class VirtualLinks:
    """A coordinator's connection to the monitor (see `dps.protocol.transport.Monitors`).

    The scheduler itself reports the processes that have ended.
    """

    def __init__(
        self,
        monitor: VirtualMonitor[Process],
        on_report: Callable[[Sighted], Awaitable[object]],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._monitor = monitor
        self._on_report = on_report
        self._tasks = Tasks(on_failure)
        self._is_following = False
        self.close = self._tasks.close

    def follow(self, monitor: str) -> None:
        """Pass reports of the monitor to the coordinator."""
        if not self._is_following:
            self._is_following = True
            self._tasks.keep(self._follow, LOOK_SECONDS)

    async def kill(self, watched: Watched, stopped: float) -> None:
        """Kill a stopped process."""
        self._monitor.kill(watched.number, stopped)

    async def _follow(self) -> None:
        while True:
            await self._on_report(Sighted(NAME, tuple(self._monitor.look())))
            await asyncio.sleep(LOOK_SECONDS)


class Peer:
    """Calls of one process to another: Dask's `rpc`, as far as dps uses it."""

    def __init__(self, network: Network[Process], source: Process, address: str) -> None:
        self._network = network
        self._source = source
        self._address = address

    async def actor_execute(self, actor: str, function: str, args: list[Any]) -> dict[str, Any]:
        """Send a message to an actor, or call another of its methods."""
        if function != "handle":
            return {"status": "OK", "result": await self._send(f"{actor}.{function}", "", [])}
        link, *frames = args
        reply = await self._send(actor, link, [frame.data for frame in frames])
        return {"status": "OK", "result": reply}

    def __getattr__(self, key: str) -> Callable[..., Awaitable[list[bytes]]]:
        async def ask(link: str, frames: list[bytes]) -> list[bytes]:
            return frozen(await self._send(key, link, thawed(frames)))

        return ask

    async def _send(self, key: str, link: str, frames: wire.Frames) -> wire.Frames:
        to, sent = Endpoint(self._address, key), carried(frames)
        try:  # callers have their own deadlines
            reply: Any = await self._network.ask(self._source, to, link, key, sent, None)
        except Unreachable as error:
            raise ConnectionResetError(str(error)) from None
        if isinstance(reply, BaseException):
            raise reply
        return carried(reply)


class _Server:
    def __init__(self, shared: Shared, process: Process) -> None:
        self.process = process
        self.address = process.address
        self.dps_platform = VirtualPlatform(shared, process)
        self.rpc = partial(Peer, shared.network, process)
        self.log_event = partial(shared.emit, process)


@dataclass
class Task:
    """A task in a worker, or an actor, which has no thread."""

    key: str
    state: str = "executing"
    thread: VirtualThread | None = None


class VirtualWorker(_Server):
    """A Dask worker on virtual time."""

    lifetime = None

    def __init__(self, shared: Shared, process: Process, spec: NodeSpec) -> None:
        super().__init__(shared, process)
        self.spec = spec
        self.name = spec.name
        self.busy = 0  # threads that run tasks that ask for its role
        self.more_resources: dict[str, float] = {}  # beside that of its role
        self.state = SimpleNamespace(tasks={}, actors={})
        self.handlers: dict[str, Any] = {}
        self.security = Security()
        self._loop = shared.loop
        self.loop = SimpleNamespace(asyncio_loop=shared.loop, add_callback=self._add_callback)
        self._current: dict[VirtualThread, str] = {}
        process.context.run(_worker_cvar.set, self)

    def describe(self) -> dict[str, Any]:
        """Return its part of the scheduler's identity."""
        return {
            "name": self.name,
            "host": self.dps_platform.host,
            "nthreads": self.spec.threads,
            "resources": {self.spec.resource: self.spec.threads, **self.more_resources},
        }

    def get_current_task(self) -> str:
        """Return the key of the task that asks."""
        current = getcurrent()
        assert isinstance(current, VirtualThread)
        return self._current[current]

    def make_actor(self, make: Callable[[], Any], key: str) -> None:
        """Make an actor, which can be called by its key from then on."""
        self.state.tasks[key] = Task(key)
        actor = self.state.actors[key] = self.process.do(make)
        services: dict[str, Any] = self.process.services

        async def handle(link: str, frames: wire.Frames) -> wire.Frames:
            reply: wire.Frames = await actor.handle(link, *frames)
            return reply

        services[key] = handle
        for name, method in inspect.getmembers(actor, inspect.iscoroutinefunction):
            if not name.startswith("_") and name != "handle":
                services[f"{key}.{name}"] = partial(_call, method)

    def run(self, work: Callable[[], Any], key: str) -> VirtualThread:
        """Run a task in a new virtual thread."""
        task = self.state.tasks[key] = Task(key)
        thread = task.thread = VirtualThread(work, self._loop, self.process)
        self._current[thread] = key
        thread.future.add_done_callback(lambda _: self._current.pop(thread, None))
        return thread

    def forget(self, key: str) -> None:
        """Remove a task or an actor whose future no client holds any more."""
        self.state.tasks.pop(key, None)
        self.state.actors.pop(key, None)

    def end(self) -> None:
        """End the tasks: the process is gone."""
        for task in self.state.tasks.values():
            if task.thread is not None:
                task.thread.kill()

    def _add_callback(self, callback: Callable[..., Any], *args: Any) -> None:
        self.process.do(lambda: self._loop.call_soon(callback, *args))


class VirtualScheduler(_Server):
    """Dask's scheduler on virtual time, with plugins, and handlers that any process may call."""

    def __init__(self, shared: Shared, process: Process) -> None:
        super().__init__(shared, process)
        self.plugins: dict[str, Any] = {}
        self.handlers = _Handlers(process.services)
        self._broker = SimpleNamespace(_topics={})

    def remove_plugin(self, name: str) -> None:
        """Remove a plugin."""
        del self.plugins[name]

    def report(self, change: Literal["add_worker", "remove_worker"], address: str) -> None:
        """Report to the plugins that a node has joined, or is gone."""
        for plugin in list(self.plugins.values()):
            self.process.do(partial(getattr(plugin, change), self, address))


class _Handlers(dict[str, Any]):
    """The handlers of the scheduler, each of which is a service of its process as well."""

    def __init__(self, services: dict[str, Any]) -> None:
        super().__init__()
        self._services = services

    def __setitem__(self, key: str, handler: Callable[..., Awaitable[list[bytes]]]) -> None:
        async def serve(link: str, frames: wire.Frames) -> wire.Frames:
            return thawed(await handler(link=link, frames=frozen(frames)))

        self._services[key] = serve
        super().__setitem__(key, handler)

    def pop(self, key: str, *default: Any) -> Any:
        self._services.pop(key, None)
        return super().pop(key, *default)


async def _call(method: Callable[[], Awaitable[None]], *_: Any) -> wire.Frames:
    await method()
    return []


async def result_of(value: Any) -> Any:
    """Return the value, or its result if it is a coroutine."""
    return await value if asyncio.iscoroutine(value) else value
