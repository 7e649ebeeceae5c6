"""A Dask client on virtual time, with the cluster behind it, for `ParameterServer`.

It provides what dps uses of Dask: it knows the nodes, creates actors and runs tasks on them,
delivers events, and notices lost nodes. All other code is that of dps, as on a real cluster.
The program that uses it runs outside of virtual time, which passes while the program waits.
"""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

import fsspec
from distributed import KilledWorker, Security
from greenlet import getcurrent

from dps.cluster.backends.base import Act, Cluster
from dps.cluster.backends.base import Process as NodeProcess
from dps.cluster.names import NodeSpec
from dps.cluster.platform import settle
from dps.virtual.disk import SCHEME, VirtualDisk
from dps.virtual.loop import Process, only_errors
from dps.virtual.network import Network
from dps.virtual.node import (
    Peer,
    Shared,
    VirtualMonitor,
    VirtualPlatform,
    VirtualScheduler,
    VirtualWorker,
    result_of,
)
from dps.virtual.profile import PLENTY, Profile
from dps.virtual.threads import BlockingLoop, VirtualFuture, VirtualThread

T = TypeVar("T")

# Clusters that a program has at once must not share files; one after the other have the same name,
# which is part of the paths in their events.
_disks_in_use: set[str] = set()


class TaskFuture(VirtualFuture[T]):
    """The result of a task, or an actor: Dask's `Future`, as far as dps uses it."""

    is_actor = False

    def __init__(
        self, client: VirtualClient, key: str, work: Callable[[], Any], addresses: Sequence[str]
    ) -> None:
        super().__init__(client.loop.asyncio_loop)
        self.key = key
        self.work = work
        self.addresses = frozenset(addresses)  # of the nodes that may do the work
        self.threads = 0  # that it takes
        self.worker: VirtualWorker | None = None  # None: it waits for one
        self._client = client

    @property
    def status(self) -> str:
        """The state, as Dask names it."""
        if not self.done():
            return "pending"
        if self.cancelled():
            return "cancelled"
        return "error" if self.exception() is not None else "finished"

    def release(self) -> None:
        """Give up the task or actor."""
        self._client.forget(self)


class VirtualClient(Cluster):
    """Virtual nodes, and the Dask client that is connected to them; used in a ``with`` statement.

    It begins with these `nodes`. All random numbers are drawn from the `seed`, and the `profile` is
    what each operation takes. Faults take effect at once. Not thread-safe: everything runs in the
    thread that made it.
    """

    asynchronous = False
    id = "virtual-client"

    def __init__(self, nodes: Sequence[NodeSpec], seed: int = 0, profile: Profile = PLENTY) -> None:
        super().__init__()
        self.client: Any = self
        self.profile = profile
        self._loop = BlockingLoop(Random(f"{seed}/work"), profile.work)
        self._loop.files = self._files_take
        self._loop.set_exception_handler(only_errors)
        self._handlers: dict[str, list[Callable[[Any], Any]]] = defaultdict(list)
        self._workers: dict[str, VirtualWorker] = {}  # all that were up, by name
        self._futures: dict[str, TaskFuture[Any]] = {}  # those that the program holds
        self._waiting: list[TaskFuture[Any]] = []  # for a node
        self._closed = False
        names = (f"cluster-{number}" for number in count())
        self._disk_name = next(name for name in names if name not in _disks_in_use)
        _disks_in_use.add(self._disk_name)
        self._disk: VirtualDisk = fsspec.filesystem(SCHEME, name=self._disk_name)
        self.security = Security()
        self.loop = SimpleNamespace(asyncio_loop=self._loop, add_callback=self._add_callback)
        self._loop.run_until_complete(self._build(seed))
        self.dps_platform = VirtualPlatform(self._shared, self._driver)
        for spec in nodes:
            self._add(spec)

    async def _build(self, seed: int) -> None:
        self.network = Network(Random(f"{seed}/network"), self.profile, Process)
        self._loop.probe = self.network.refuses
        monitor = VirtualMonitor[Process](lambda process: self.kill(process.name))
        path = f"{SCHEME}://{self._disk_name}"
        self._shared = Shared(self._loop, self.network, self._emit, path, monitor)
        self._driver = self.network.process("driver")
        process = self.network.process("scheduler")
        self._scheduler = VirtualScheduler(self._shared, process)
        self.scheduler = SimpleNamespace(address=process.address, identity=self._identity)

    def close(self) -> None:
        """End everything that still runs; no more time passes."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers.values():
            worker.end()
        self._loop.resume_all()
        self._loop.run_until_complete(_ended(self._loop))
        self._loop.close()
        self._disk.erase()
        _disks_in_use.discard(self._disk_name)

    @property
    def status(self) -> str:
        """Whether it is "running" or "closed"."""
        return "closed" if self._closed else "running"

    # -- what dps uses of Dask's client ----------------------------------------------------------

    def sync(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function or coroutine function in the driver's process; return its result."""

        async def call() -> Any:
            return await result_of(function(*args, **kwargs))

        if isinstance(getcurrent(), VirtualThread):
            return self.dps_platform.begin(call(), self._loop).result()
        task = self._driver.do(lambda: self._loop.create_task(call()))
        return self._loop.drive(task)

    def rpc(self, address: str) -> Peer:
        """Connect to a process."""
        return Peer(self.network, self._driver, address)

    def submit(
        self,
        function: Callable[..., Any],
        *args: Any,
        key: str,
        workers: Sequence[str],
        resources: Mapping[str, float] | None = None,
        actor: bool = False,
        **_: Any,
    ) -> TaskFuture[Any]:
        """Run a task, or create an actor, on the least busy of some nodes, once one of them can."""
        future: TaskFuture[Any] = TaskFuture(self, key, partial(function, *args), workers)
        future.is_actor, future.threads = actor, int(resources is not None and not actor)
        self._futures[key] = future
        self._waiting.append(future)
        self._loop.call_soon(self._place)
        return future

    def gather(self, futures: Iterable[VirtualFuture[Any]]) -> list[Any]:
        """Wait for all, and return their results in order; raise the first error among them."""
        return [future.result() for future in futures]

    async def cancel(self, futures: Iterable[TaskFuture[Any]]) -> None:
        """Cancel tasks; those that run end when they next ask for their state."""
        for future in futures:
            worker = future.worker
            if worker is not None and future.key in worker.state.tasks:
                worker.state.tasks[future.key].state = "cancelled"
            future.cancel()

    async def register_plugin(self, plugin: Any) -> None:
        """Add a plugin to the scheduler."""
        await self._hop()
        self._scheduler.plugins[plugin.name] = plugin
        await self._scheduler.process.run(plugin.start(self._scheduler))
        await self._hop()

    async def run_on_scheduler(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the scheduler's process."""
        work = result_of(function(*args, dask_scheduler=self._scheduler))
        await self._hop()
        result = await self._scheduler.process.run(work)
        await self._hop()
        return result

    async def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        workers: Sequence[str] | None = None,
        on_error: str = "raise",
    ) -> dict[str, Any]:
        """Run a function on nodes, and return each result by the node's address."""
        alive = [w for w in self.alive() if workers is None or w.address in workers]
        await self._hop()
        running = {w.address: w.process.run(_call_on(w, function, args)) for w in alive}
        await asyncio.wait(running.values()) if running else None
        await self._hop()
        results = {}
        for address, task in running.items():
            error = OSError(f"{address} is gone") if task.cancelled() else task.exception()
            if error is None:
                results[address] = task.result()
            elif on_error == "raise":
                raise error
        return results

    def subscribe_topic(self, topic: str, handler: Callable[[Any], Any]) -> None:
        """Call a handler with every event of a topic."""
        self._handlers[topic].append(handler)

    def unsubscribe_topic(self, topic: str) -> None:
        """Remove the handlers of a topic."""
        self._handlers.pop(topic, None)

    async def log_event(self, topic: str, message: Any) -> None:
        """Send an event to the handlers of its topic."""
        self._emit(self._driver, topic, message)

    async def _identity(self, n_workers: int = -1) -> dict[str, Any]:
        await self._hop()
        workers = {worker.address: worker.describe() for worker in self.alive()}
        await self._hop()
        return {"workers": workers}

    # -- nodes, as of any `Cluster` --------------------------------------------------------------

    def start(self, node: NodeSpec) -> None:
        """Start a node; it joins when it is up."""
        with self._claimed(node):
            self.network.later(self.profile.start, self._add, node)

    def kill(self, name: str) -> int:
        """End a node's process at once; the scheduler notices a little later."""
        pid, worker = self._living(name).pid, self._workers[name]
        worker.end()
        self.network.crash(worker.process)
        self.network.later(self.profile.detection, self._notice, worker)
        return pid

    def gone(self, name: str, deadline: float) -> bool:
        """Whether a node's process has ended."""
        return not self._workers[name].process.alive

    def stopped(self, name: str, deadline: float) -> bool:
        """Whether a node's process is stopped."""
        return self._workers[name].process.is_stopped

    def running(self, name: str, deadline: float) -> bool:
        """Whether a node's process is there and not stopped."""
        return not (self.gone(name, deadline) or self.stopped(name, deadline))

    def obstacle(self, name: str, act: Act) -> str | None:
        """Return why something cannot be done to a node's process; None if it can."""
        if act == "limit":
            return f"{name} is a node on virtual time; its disk is in memory and cannot fill up"
        return self.NO_QUEUE if act in ("requeue", "host") else None

    def alive(self) -> list[VirtualWorker]:
        """Return the nodes whose processes have not ended, in the order of their starts."""
        return [worker for worker in self._workers.values() if worker.process.alive]

    def _signal(self, name: str, number: int) -> int:
        pid = self._living(name).pid
        act = self.network.pause if number == signal.SIGSTOP else self.network.resume
        act(self._workers[name].process)
        return pid

    def _add(self, spec: NodeSpec) -> None:
        process = self.network.process(spec.name)
        worker = self._workers[spec.name] = VirtualWorker(self._shared, process, spec)
        self._specs[spec.name] = spec
        self._processes[spec.name] = NodeProcess(worker.dps_platform.pid, None, worker.address)
        self._scheduler.report("add_worker", process.address)
        self._loop.call_soon(self._place)

    def _notice(self, worker: VirtualWorker) -> None:
        self._scheduler.report("remove_worker", worker.address)
        for key, future in list(self._futures.items()):
            if future.worker is worker and not future.done():
                future.set_exception(KilledWorker(key, SimpleNamespace(address=worker.address), 0))

    def _files_take(self) -> Callable[[], float]:
        before = self._disk.moved
        return lambda: self.profile.disk.seconds(self._disk.moved - before)

    # -- tasks and actors --------------------------------------------------------------------------

    def forget(self, future: TaskFuture[Any]) -> None:
        """Drop a task or actor that the program does not hold any more."""
        if self._futures.pop(future.key, None) is not None and future.worker is not None:
            future.worker.forget(future.key)

    def _place(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            able = [
                worker
                for worker in self.alive()
                if worker.address in future.addresses
                and (not future.threads or worker.busy < worker.spec.threads)
            ]
            if not able:
                self._waiting.append(future)
                continue
            worker = future.worker = min(able, key=lambda w: w.busy)
            worker.busy += future.threads
            begin = self._make if future.is_actor else self._run
            self.network.later(2 * self.profile.link.latency, begin, future, worker)

    def _make(self, future: TaskFuture[Any], worker: VirtualWorker) -> None:
        if not worker.process.alive or future.done():
            return  # the future fails when the loss is noticed
        try:
            worker.make_actor(future.work, future.key)
        except Exception as error:  # noqa: BLE001 - raised where the actor is waited for
            future.set_exception(error)
        else:
            actor = worker.state.actors[future.key]
            self.network.later(self.profile.actor, self._made, future, worker, actor)

    def _made(self, future: TaskFuture[Any], worker: VirtualWorker, actor: Any) -> None:
        if worker.process.alive and not future.done():
            future.set_result(actor)

    def _run(self, future: TaskFuture[Any], worker: VirtualWorker) -> None:
        if worker.process.alive and not future.done():
            thread = worker.run(future.work, future.key)
            thread.future.add_done_callback(partial(self._ended, future, worker))
        else:  # it was cancelled on the way, or while it waited for a node
            self._leave(future, worker)

    def _ended(
        self, future: TaskFuture[Any], worker: VirtualWorker, ended: VirtualFuture[Any]
    ) -> None:
        worker.forget(future.key)
        if not ended.cancelled():  # of a killed process, nothing comes
            self.network.later(self.profile.link.latency, settle, future, ended)
        self._leave(future, worker)

    def _leave(self, future: TaskFuture[Any], worker: VirtualWorker) -> None:
        worker.busy -= future.threads
        self._place()

    # -- events ----------------------------------------------------------------------------------

    def _emit(self, process: Process, topic: str, message: Any) -> None:
        """Deliver an event to the driver, if the process that sends it is alive."""
        if process.alive and topic in self._handlers:
            self.network.later(2 * self.profile.link.latency, self._receive, topic, message)

    def _receive(self, topic: str, message: Any) -> None:
        for handler in self._handlers.get(topic, ()):
            self._driver.run(_called(handler, (self._loop.time(), message)))

    def _add_callback(self, callback: Callable[..., Any], *args: Any) -> None:
        self._driver.do(lambda: self._loop.call_soon(_begin, callback, args))

    async def _hop(self) -> None:
        await asyncio.sleep(self.profile.link.latency)


async def _called(handler: Callable[[Any], Any], event: Any) -> None:
    await result_of(handler(event))


async def _call_on(worker: VirtualWorker, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    given = {"dask_worker": worker} if "dask_worker" in signature(function).parameters else {}
    return await result_of(function(*args, **given))


async def _ended(loop: asyncio.AbstractEventLoop) -> None:
    await asyncio.sleep(0)
    others = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _begin(callback: Callable[..., Any], args: Sequence[Any]) -> None:
    work = callback(*args)
    if isinstance(work, Coroutine):
        asyncio.ensure_future(work)  # noqa: RUF006 - the network's process keeps it
