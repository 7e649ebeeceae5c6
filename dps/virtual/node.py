"""The processes of a virtual cluster as dps knows them: Dask workers, and the scheduler.

Each offers what dps uses of the real one, and no more. An actor or a task in it runs in its
simulated process: it ends with that, and stands still while that is paused.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from distributed import Security
from distributed.worker import _worker_cvar
from greenlet import getcurrent

from dps.cluster.names import NodeSpec
from dps.cluster.transport.calls import frozen, thawed
from dps.protocol import wire
from dps.protocol.transport import Endpoint
from dps.virtual.loop import Process
from dps.virtual.network import Network
from dps.virtual.platform import VirtualMonitor, VirtualPlatform
from dps.virtual.threads import BlockingLoop, VirtualThread

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST_CALL = 3600.0  # whoever calls has a deadline of its own

Tell = Callable[[Process, str, Any], None]


@dataclass(frozen=True)
class Place:
    """What all processes of a virtual cluster share.

    `tell` has the scheduler send an event on to whoever listens to its topic; `disk` is where all
    nodes keep files; `monitor` watches them.
    """

    loop: BlockingLoop
    network: Network[Process]
    tokens: Iterator[int]
    tell: Tell
    disk: str
    monitor: VirtualMonitor

    def platform(self, process: Process, number: int) -> VirtualPlatform:
        """The platform of a process."""
        used = partial(self.network.busy.__getitem__, process.address)
        shared = self.tokens, self.disk, used, self.monitor
        return VirtualPlatform(self.loop, process, number, *shared)


class Peer:
    """Calls of one process to another: Dask's `rpc`, as far as dps uses it."""

    def __init__(self, place: Place, source: Process, address: str) -> None:
        self._place = place
        self._source = source
        self._address = address

    async def actor_execute(self, actor: str, function: str, args: list[Any]) -> dict[str, Any]:
        """Have an actor do something: carry out a message, or a method of its own."""
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
        to = Endpoint(self._address, key)
        return await self._place.network.request(self._source, to, link, frames, LONGEST_CALL)


class _Server:
    """What Dask workers and the scheduler have in common."""

    def __init__(self, place: Place, process: Process, number: int) -> None:
        self.process = process
        self.address = process.address
        self.dps_platform = place.platform(process, number)
        self._place = place

    def rpc(self, address: str) -> Peer:
        """Connect to another process."""
        return Peer(self._place, self.process, address)

    def log_event(self, topic: str, message: Any) -> None:
        """Send an event to whoever listens to the topic."""
        self._place.tell(self.process, topic, message)


@dataclass
class Task:
    """Something that a worker was asked to run, or an actor in it."""

    key: str
    state: str = "executing"
    thread: VirtualThread | None = None


@dataclass
class _State:
    tasks: dict[str, Task] = field(default_factory=dict)
    actors: dict[str, Any] = field(default_factory=dict)


class VirtualWorker(_Server):
    """A Dask worker on virtual time.

    Attributes
    ----------
    spec
        What it was started as.
    busy
        How many of its threads a task has that asks for its role.
    more_resources
        Further Dask resources that it says that it has.
    """

    lifetime = None

    def __init__(self, place: Place, process: Process, number: int, spec: NodeSpec) -> None:
        super().__init__(place, process, number)
        self.spec = spec
        self.name = spec.name
        self.busy = 0
        self.more_resources: dict[str, float] = {}
        self.state = _State()
        self.handlers: dict[str, Any] = {}
        self.security = Security()
        self.loop = SimpleNamespace(asyncio_loop=place.loop, add_callback=self._add_callback)
        self._current: dict[VirtualThread, str] = {}
        process.do(lambda: None)  # has its context made
        assert process._context is not None
        process._context.run(_worker_cvar.set, self)

    def describe(self) -> dict[str, Any]:
        """What the scheduler says of it."""
        return {
            "name": self.name,
            "host": self.dps_platform.host,
            "nthreads": self.spec.threads,
            "resources": {self.spec.resource: self.spec.threads, **self.more_resources},
        }

    def get_current_task(self) -> str:
        """The key of the task that asks."""
        current = getcurrent()
        assert isinstance(current, VirtualThread)
        return self._current[current]

    def make_actor(self, make: Callable[[], Any], key: str) -> None:
        """Make an actor, which can be called by its key from then on."""
        self.state.tasks[key] = Task(key)
        actor = self.state.actors[key] = self.process.do(make)
        services: dict[str, Any] = self.process.services

        async def handle(link: str, frames: wire.Frames) -> wire.Frames:
            found: wire.Frames = await actor.handle(link, *frames)
            return found

        services[key] = handle
        for name, method in inspect.getmembers(actor, inspect.iscoroutinefunction):
            if not name.startswith("_") and name != "handle":
                services[f"{key}.{name}"] = _called(method)

    def run(self, work: Callable[[], Any], key: str) -> VirtualThread:
        """Run a task in a thread of its own."""
        task = self.state.tasks[key] = Task(key)
        thread = task.thread = VirtualThread(work, self._place.loop, self.process)
        self._current[thread] = key
        thread.future.add_done_callback(lambda _: self._current.pop(thread, None))
        return thread

    def forget(self, key: str) -> None:
        """Let go of a task or an actor, of which no client holds the future any more."""
        self.state.tasks.pop(key, None)
        self.state.actors.pop(key, None)

    def end(self) -> None:
        """End what runs in it: its process is gone."""
        for task in self.state.tasks.values():
            if task.thread is not None:
                task.thread.kill()

    async def close_gracefully(self, reason: str) -> None:
        """Nothing tells a virtual node to leave."""
        raise NotImplementedError(reason)

    def _add_callback(self, callback: Callable[..., Any], *args: Any) -> None:
        self.process.do(lambda: self._place.loop.call_soon(callback, *args))


def _called(method: Callable[[], Awaitable[None]]) -> Callable[..., Awaitable[wire.Frames]]:
    async def call(link: str, frames: wire.Frames) -> wire.Frames:
        await method()
        return []

    return call


class VirtualScheduler(_Server):
    """Dask's scheduler on virtual time: it has plugins, and handlers that anybody may call."""

    def __init__(self, place: Place, process: Process, number: int) -> None:
        super().__init__(place, process, number)
        self.plugins: dict[str, Any] = {}
        self.handlers: Mapping[str, Any] = _Handlers(process)
        self._broker = SimpleNamespace(_topics={})

    def remove_plugin(self, name: str) -> None:
        """Have a plugin told of nothing more."""
        del self.plugins[name]

    def joined(self, address: str) -> None:
        """Tell the plugins that a node has joined."""
        for plugin in list(self.plugins.values()):
            self.process.do(partial(plugin.add_worker, self, address))

    def lost(self, address: str) -> None:
        """Tell the plugins that a node is gone."""
        for plugin in list(self.plugins.values()):
            self.process.do(partial(plugin.remove_worker, self, address))


class _Handlers(dict[str, Any]):
    """The handlers of the scheduler, each of which is a service of its process as well."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._services: dict[str, Any] = process.services

    def __setitem__(self, key: str, handler: Callable[..., Awaitable[list[bytes]]]) -> None:
        async def serve(link: str, frames: wire.Frames) -> wire.Frames:
            return thawed(await handler(link=link, frames=frozen(frames)))

        self._services[key] = serve
        super().__setitem__(key, handler)

    def pop(self, key: str, *default: Any) -> Any:
        """Take a handler back."""
        self._services.pop(key, None)
        return super().pop(key, *default)


def takes_worker(function: Callable[..., Any], name: str) -> bool:
    """Whether a function is to be given the Dask worker or scheduler that it runs in."""
    return name in inspect.signature(function).parameters


async def result_of(value: Any) -> Any:
    """A value, or what comes of it if it is to be awaited."""
    return await value if asyncio.iscoroutine(value) else value
