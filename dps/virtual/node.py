"""The processes of a virtual cluster as dps knows them: Dask workers, and the scheduler.

Each provides what dps uses of the real one, and no more. An actor or a task in it runs in its
simulated process: it ends with the process, and stands still while that is paused.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from distributed import Security
from distributed.worker import _worker_cvar
from greenlet import getcurrent

from dps.cluster.names import NodeSpec
from dps.cluster.transport.calls import frozen, thawed
from dps.errors import Unreachable
from dps.protocol import wire
from dps.protocol.transport import Endpoint
from dps.virtual.loop import Process
from dps.virtual.network import Network, carried
from dps.virtual.platform import Shared, VirtualPlatform
from dps.virtual.threads import VirtualThread

LONGEST_CALL = 3600.0  # seconds; callers have deadlines of their own


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
        try:
            reply: Any = await self._network.ask(self._source, to, link, key, sent, LONGEST_CALL)
        except Unreachable as error:
            raise ConnectionResetError(str(error)) from None
        if isinstance(reply, BaseException):
            raise reply
        return carried(reply)


class _Server:
    """What Dask workers and the scheduler have in common."""

    def __init__(self, shared: Shared, process: Process) -> None:
        self.process = process
        self.address = process.address
        self.dps_platform = VirtualPlatform(shared, process)
        self.rpc = partial(Peer, shared.network, process)
        self.log_event = partial(shared.tell, process)


@dataclass
class Task:
    """A task in a worker, or an actor, which has no thread."""

    key: str
    state: str = "executing"
    thread: VirtualThread | None = None


@dataclass
class _State:
    tasks: dict[str, Task] = field(default_factory=dict)
    actors: dict[str, Any] = field(default_factory=dict)


class VirtualWorker(_Server):
    """A Dask worker on virtual time.

    `busy` threads run tasks that ask for its role; `more_resources` are what it offers besides.
    """

    lifetime = None

    def __init__(self, shared: Shared, process: Process, spec: NodeSpec) -> None:
        super().__init__(shared, process)
        self.spec = spec
        self.name = spec.name
        self.busy = 0
        self.more_resources: dict[str, float] = {}
        self.state = _State()
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
        """Run a task in a thread of its own."""
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

    def joined(self, address: str) -> None:
        """Report to the plugins that a node has joined."""
        for plugin in list(self.plugins.values()):
            self.process.do(partial(plugin.add_worker, self, address))

    def lost(self, address: str) -> None:
        """Report to the plugins that a node is gone."""
        for plugin in list(self.plugins.values()):
            self.process.do(partial(plugin.remove_worker, self, address))


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
        """Remove a handler, and return it."""
        self._services.pop(key, None)
        return super().pop(key, *default)


async def _call(method: Callable[[], Awaitable[None]], *_: Any) -> wire.Frames:
    await method()
    return []


async def result_of(value: Any) -> Any:
    """Return the value, or its result if it is a coroutine."""
    return await value if asyncio.iscoroutine(value) else value
