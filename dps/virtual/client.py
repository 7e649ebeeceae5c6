"""A Dask client on virtual time, with the cluster behind it: what `ParameterServer` is given.

It does what dps asks of Dask: it knows the nodes, makes actors and runs tasks on them, carries
events to who listens, and notices that a node is gone. Everything else is dps's own code, as on a
real cluster. The program that uses it runs outside of virtual time, which passes while the program
waits for something.
"""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from types import SimpleNamespace, TracebackType
from typing import Any, Self, TypeVar

from distributed import KilledWorker, Security
from greenlet import getcurrent

from dps.cluster.backends.base import Act, Cluster
from dps.cluster.names import NodeSpec
from dps.errors import ConfigurationError
from dps.virtual.disk import SCHEME, disk
from dps.virtual.loop import Process, only_errors
from dps.virtual.network import Network
from dps.virtual.node import Peer, Place, VirtualScheduler, VirtualWorker, result_of, takes_worker
from dps.virtual.platform import VirtualMonitor
from dps.virtual.profile import PLENTY, Profile
from dps.virtual.threads import BlockingLoop, VirtualFuture, VirtualThread

T = TypeVar("T")

FIRST_PID = 100

# Clusters that a program has at once must not share files; one after the other have the same name,
# which is part of the paths in their events.
_disks = count()
_free_disks: list[int] = []


class VirtualClient:
    """A client, and the virtual nodes that it is connected to; used in a ``with`` statement.

    Not thread-safe: the thread that made it is the one in which everything runs.

    Parameters
    ----------
    nodes
        The nodes that are there from the start.
    seed
        All that happens by chance is drawn from it.
    profile
        What costs how much time.
    """

    asynchronous = False
    id = "virtual-client"

    def __init__(self, nodes: Sequence[NodeSpec], seed: int = 0, profile: Profile = PLENTY) -> None:
        self._loop = BlockingLoop(Random(f"{seed}/work"), profile.work)
        self._loop.files = self._files_take
        self.profile = profile
        self._loop.set_exception_handler(only_errors)
        self._numbers = count(FIRST_PID)
        self._handlers: dict[str, list[Callable[[Any], Any]]] = defaultdict(list)
        self._workers: dict[str, VirtualWorker] = {}  # all that were started, by name
        self._closed = False
        self._disk_number = heappop(_free_disks) if _free_disks else next(_disks)
        name = f"cluster-{self._disk_number}"
        self._disk, self._files = disk(name), f"{SCHEME}://{name}"
        self.security = Security()
        self.loop = SimpleNamespace(asyncio_loop=self._loop, add_callback=self._add_callback)
        self._loop.run_until_complete(self._build(seed))
        self.dps_platform = self._place.platform(self._driver, next(self._numbers))
        for spec in nodes:
            self._add(spec)

    async def _build(self, seed: int) -> None:
        self.network = Network(Random(f"{seed}/network"), self.profile, Process)
        self._loop.probe = self.network.refuses
        monitor = VirtualMonitor(lambda process: self.kill(process.name))
        shared = count(), self._tell, self._files, monitor
        self._place = Place(self._loop, self.network, *shared)
        self._driver = self.network.process("driver")
        process = self.network.process("scheduler")
        self._tasks = Tasks(self._loop, self.profile, self.network.nowhere, self.alive)
        self._scheduler = VirtualScheduler(self._place, process, next(self._numbers))
        self.scheduler = SimpleNamespace(address=process.address, identity=self._identity)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything that still runs; no time passes any more."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers.values():
            worker.end()
        self._loop.resume_all()
        self._loop.run_until_complete(_ended(self._loop))
        self._loop.close()
        self._disk.erase()
        heappush(_free_disks, self._disk_number)

    @property
    def status(self) -> str:
        """Whether it is "running" or "closed"."""
        return "closed" if self._closed else "running"

    @property
    def now(self) -> float:
        """Virtual seconds since the cluster was made."""
        return self._loop.time()

    # -- what dps asks of Dask's client ----------------------------------------------------------

    def sync(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Have something done in the driver's process, and return what comes of it."""

        async def call() -> Any:
            return await result_of(function(*args, **kwargs))

        current = getcurrent()
        if isinstance(current, VirtualThread):
            return self.dps_platform.begin(call(), self._loop).result()
        task = self._driver.do(lambda: self._loop.create_task(call()))
        return self._loop.drive(task)

    def rpc(self, address: str) -> Any:
        """Connect to a process."""
        return Peer(self._place, self._driver, address)

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
        """Have a task run, or an actor made, on one of some nodes: the one that is least busy."""
        work = partial(function, *args)
        if actor:
            return self._tasks.make(work, key, workers)
        return self._tasks.run(work, key, workers, takes_a_thread=resources is not None)

    def gather(self, futures: Iterable[VirtualFuture[Any]]) -> list[Any]:
        """Wait for all, and return their results in order; raises the first error among them."""
        return [future.result() for future in futures]

    async def cancel(self, futures: Iterable[TaskFuture[Any]]) -> None:
        """Have tasks end: dps asks now and then whether its own is wanted still."""
        self._tasks.cancel(futures)

    async def register_plugin(self, plugin: Any) -> None:
        """Have a plugin of the scheduler."""
        await self._hop()
        self._scheduler.plugins[plugin.name] = plugin
        await self._scheduler.process.run(plugin.start(self._scheduler))
        await self._hop()

    async def run_on_scheduler(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the scheduler's process."""
        work = result_of(function(*args, dask_scheduler=self._scheduler))
        await self._hop()
        found = await self._scheduler.process.run(work)
        await self._hop()
        return found

    async def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        workers: Sequence[str] | None = None,
        on_error: str = "raise",
    ) -> dict[str, Any]:
        """Run a function on nodes, and return what each has returned, by its address."""
        alive = [w for w in self.alive() if workers is None or w.address in workers]
        await self._hop()
        running = {w.address: w.process.run(_asked(w, function, args)) for w in alive}
        await asyncio.wait(running.values()) if running else None
        await self._hop()
        found = {}
        for address, task in running.items():
            error = OSError(f"{address} is gone") if task.cancelled() else task.exception()
            if error is None:
                found[address] = task.result()
            elif on_error == "raise":
                raise error
        return found

    def subscribe_topic(self, topic: str, handler: Callable[[Any], Any]) -> None:
        """Have a handler called with every event of a topic."""
        self._handlers[topic].append(handler)

    def unsubscribe_topic(self, topic: str) -> None:
        """Have nobody called any more."""
        self._handlers.pop(topic, None)

    async def log_event(self, topic: str, message: Any) -> None:
        """Send an event to whoever listens to the topic."""
        self._tell(self._driver, topic, message)

    async def _identity(self, n_workers: int = -1) -> dict[str, Any]:
        await self._hop()
        found = {worker.address: worker.describe() for worker in self.alive()}
        await self._hop()
        return {"workers": found}

    # -- nodes -----------------------------------------------------------------------------------

    def node(self, name: str) -> VirtualWorker:
        """The node of this name, which may be gone; `KeyError`: none was started."""
        return self._workers[name]

    @property
    def started(self) -> dict[str, VirtualWorker]:
        """All nodes that were started, by name."""
        return self._workers

    def start(self, spec: NodeSpec) -> None:
        """Have one more node; it joins when it is up."""
        if spec.name in self._workers:
            raise ConfigurationError(f"there is a node {spec.name!r} already")
        self._as_nobody(lambda: self._loop.call_later(self.profile.start, self._add, spec))

    def kill(self, name: str) -> None:
        """End a node's process at once; the scheduler notices a little later."""
        worker = self._workers[name]
        if not worker.process.alive:
            raise ProcessLookupError(f"{name}: there is no such process")
        worker.end()
        self.network.crash(worker.process)
        self._as_nobody(
            lambda: self._loop.call_later(self.profile.detection, self._noticed, worker)
        )

    def _add(self, spec: NodeSpec) -> None:
        process = self.network.process(spec.name)
        self._workers[spec.name] = VirtualWorker(self._place, process, next(self._numbers), spec)
        self._scheduler.joined(process.address)
        self._tasks.look_for_nodes()

    def _noticed(self, worker: VirtualWorker) -> None:
        """A node is gone: so is all that was to come of it."""
        self._scheduler.lost(worker.address)
        self._tasks.lost(worker)

    def alive(self) -> list[VirtualWorker]:
        """The nodes whose processes have not ended, in the order in which they were started."""
        return [worker for worker in self._workers.values() if worker.process.alive]

    def _files_take(self) -> Callable[[], float]:
        before = self._disk.moved
        return lambda: self.profile.disk.seconds(self._disk.moved - before)

    @property
    def _latency(self) -> float:
        return self.profile.link.latency

    # -- events ----------------------------------------------------------------------------------

    def _tell(self, process: Process, topic: str, message: Any) -> None:
        """Bring an event to the driver, if its process is there to send it."""
        if process.alive and topic in self._handlers:
            self._as_nobody(
                lambda: self._loop.call_later(2 * self._latency, self._receive, topic, message)
            )

    def _receive(self, topic: str, message: Any) -> None:
        for handler in self._handlers.get(topic, ()):
            self._driver.run(_called(handler, (self._loop.time(), message)))

    def _add_callback(self, callback: Callable[..., Any], *args: Any) -> None:
        self._driver.do(lambda: self._loop.call_soon(_begin, callback, args))

    async def _hop(self) -> None:
        await asyncio.sleep(self._latency)

    def _as_nobody(self, act: Callable[[], object]) -> None:
        """Do something that goes on whatever becomes of the process that asks for it."""
        self.network.nowhere.run(act)


async def _called(handler: Callable[[Any], Any], event: Any) -> None:
    await result_of(handler(event))


async def _asked(worker: VirtualWorker, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    given = {"dask_worker": worker} if takes_worker(function, "dask_worker") else {}
    return await result_of(function(*args, **given))


async def _ended(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel every task, and let all of them end."""
    await asyncio.sleep(0)
    others = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _begin(callback: Callable[..., Any], args: Sequence[Any]) -> None:
    found = callback(*args)
    if isinstance(found, Coroutine):
        asyncio.ensure_future(found)  # noqa: RUF006 - the network's process keeps it


class VirtualNodes(Cluster):
    """The nodes of a virtual client. What is done to one has its effect at once."""

    NO_QUEUE = (
        "to requeue a job or take a host away, nodes must be jobs of Slurm, which nodes on virtual "
        "time are not; plan a kill by signal"
    )

    def __init__(self, client: VirtualClient) -> None:
        super().__init__()
        self._stack.callback(client.close)
        self._virtual = client
        dask: Any = client  # it has what dps uses of one
        self.client = dask

    @property
    def pids(self) -> dict[str, int]:
        """A number for each node that was started."""
        return {name: node.dps_platform.pid for name, node in self._virtual.started.items()}

    def spec(self, name: str) -> NodeSpec:
        """What the node of this name was started as."""
        return self._virtual.node(name).spec

    def start(self, node: NodeSpec) -> None:
        """Have one more node; it joins when it is up."""
        self._virtual.start(node)

    def kill(self, name: str) -> int:
        """Kill a node's process; return its number."""
        self._virtual.kill(name)
        return self.pids[name]

    def gone(self, name: str, deadline: float) -> bool:
        """Whether a node's process has ended."""
        return not self._process(name).alive

    def stopped(self, name: str, deadline: float) -> bool:
        """Whether a node's process is stopped."""
        return self._process(name).paused_at is not None

    def running(self, name: str, deadline: float) -> bool:
        """Whether a node's process is there and not stopped."""
        process = self._process(name)
        return process.alive and process.paused_at is None

    def obstacle(self, name: str, act: Act) -> str | None:
        """Why something cannot be done to a node's process; None: it can."""
        if act == "limit":
            return f"{name} is a node on virtual time, whose disk is in memory and never full"
        return self.NO_QUEUE if act in ("requeue", "host") else None

    def _process(self, name: str) -> Process:
        return self._virtual.node(name).process

    def _signal(self, name: str, number: int) -> int:
        process = self._process(name)
        if not process.alive:
            raise ProcessLookupError(f"{name}: there is no such process")
        if number == signal.SIGSTOP:
            self._virtual.network.pause(process)
        else:
            self._virtual.network.resume(process)
        return self.pids[name]


class TaskFuture(VirtualFuture[T]):
    """What becomes of a task or an actor: Dask's `Future`, as far as dps uses it."""

    def __init__(self, loop: BlockingLoop, key: str, let_go: Callable[[str], None]) -> None:
        super().__init__(loop)
        self.key = key
        self._let_go = let_go

    @property
    def status(self) -> str:
        """Dask's word for how it stands."""
        if not self.done():
            return "pending"
        if self.cancelled():
            return "cancelled"
        return "error" if self.exception() is not None else "finished"

    def release(self) -> None:
        """Have no more interest in it."""
        self._let_go(self.key)


@dataclass(frozen=True)
class _Waiting:
    """What waits for a node: how it begins there, which ones may have it, if they have a thread."""

    begin: Callable[[VirtualWorker], None]
    addresses: Sequence[str]
    takes_a_thread: bool


class Tasks:
    """All tasks and actors of a cluster that somebody holds the futures of.

    Parameters
    ----------
    loop, profile
        On which time passes, and what takes how much of it.
    nowhere
        The context of what goes on whatever becomes of the process that asks for it.
    alive
        Says which nodes there are.
    """

    def __init__(
        self,
        loop: BlockingLoop,
        profile: Profile,
        nowhere: Context,
        alive: Callable[[], list[VirtualWorker]],
    ) -> None:
        self._loop = loop
        self._profile = profile
        self._nowhere = nowhere
        self._alive = alive
        self._futures: dict[str, tuple[VirtualWorker | None, TaskFuture[Any]]] = {}
        self._queue: list[_Waiting] = []

    def make(self, make: Callable[[], Any], key: str, addresses: Sequence[str]) -> TaskFuture[Any]:
        """Have an actor made on the least busy of some nodes."""
        future = self._future(key)
        self._wait(_Waiting(lambda worker: self._make(make, future, worker), addresses, False))
        return future

    def run(
        self, work: Callable[[], Any], key: str, addresses: Sequence[str], takes_a_thread: bool
    ) -> TaskFuture[Any]:
        """Have a task run on the least busy of some nodes; it may need one of a node's threads."""
        future = self._future(key)

        def begin(worker: VirtualWorker) -> None:
            self._run(work, future, takes_a_thread, worker)

        self._wait(_Waiting(begin, addresses, takes_a_thread))
        return future

    def cancel(self, futures: Iterable[TaskFuture[Any]]) -> None:
        """Have tasks end, as soon as they ask whether they are wanted still."""
        for future in futures:
            worker, _ = self._futures.get(future.key, (None, None))
            if worker is not None and future.key in worker.state.tasks:
                worker.state.tasks[future.key].state = "cancelled"
            future.cancel()

    def lost(self, worker: VirtualWorker) -> None:
        """Tell whoever waits for something of a node that the node is gone."""
        for key, (at, future) in list(self._futures.items()):
            if at is worker and not future.done():
                future.set_exception(KilledWorker(key, SimpleNamespace(address=at.address), 0))

    def look_for_nodes(self) -> None:
        """Look soon whether there is a node for what waits for one."""
        self._loop.call_soon(self._place)

    def _future(self, key: str) -> TaskFuture[Any]:
        future: TaskFuture[Any] = TaskFuture(self._loop, key, self._forget)
        self._futures[key] = (None, future)
        return future

    def _wait(self, waiting: _Waiting) -> None:
        self._queue.append(waiting)
        self.look_for_nodes()

    def _place(self) -> None:
        """Begin what there is a node for; the rest waits for one."""
        left, self._queue = self._queue, []
        for waiting in left:
            able = [w for w in self._alive() if w.address in waiting.addresses]
            if waiting.takes_a_thread:
                able = [w for w in able if w.busy < w.spec.threads]
            if able:
                waiting.begin(min(able, key=lambda w: w.busy))
            else:
                self._queue.append(waiting)

    def _make(
        self, make: Callable[[], Any], future: TaskFuture[Any], worker: VirtualWorker
    ) -> None:
        self._futures[future.key] = (worker, future)

        def done() -> None:
            if not worker.process.alive or future.done():
                return  # whoever waits is told when that is noticed
            try:
                worker.make_actor(make, future.key)
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the actor
                future.set_exception(error)
            else:
                actor = worker.state.actors[future.key]
                self._later(self._profile.actor, tell, actor)

        def tell(actor: Any) -> None:
            if worker.process.alive and not future.done():
                future.set_result(actor)

        self._later(2 * self._latency, done)

    def _run(
        self,
        work: Callable[[], Any],
        future: TaskFuture[Any],
        takes_a_thread: bool,
        worker: VirtualWorker,
    ) -> None:
        self._futures[future.key] = (worker, future)
        worker.busy += takes_a_thread

        def begin() -> None:
            if worker.process.alive and not future.done():
                thread = worker.run(work, future.key)
                thread.future.add_done_callback(end)
            else:  # it was cancelled on the way, or while it waited for a node
                leave()

        def end(ended: Any) -> None:
            worker.forget(future.key)
            self._later(self._latency, tell, ended)
            leave()

        def leave() -> None:
            worker.busy -= takes_a_thread
            self._place()

        def tell(ended: Any) -> None:
            if future.done() or ended.cancelled():
                return
            if (error := ended.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(ended.result())

        self._later(2 * self._latency, begin)

    def _forget(self, key: str) -> None:
        worker, _ = self._futures.pop(key, (None, None))
        if worker is not None:
            worker.forget(key)

    def _later(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        """Do something later, whatever becomes of the process that asks for it."""
        self._nowhere.run(lambda: self._loop.call_later(seconds, act, *args))

    @property
    def _latency(self) -> float:
        return self._profile.link.latency
