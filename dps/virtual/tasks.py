"""Tasks and actors of virtual nodes: which node has them, and what whoever asked is told of them.

As with Dask, each has a future. It waits for a node that may have it, begins there a message later,
and what it has come to is known a message after its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from distributed import KilledWorker

from dps.virtual.node import VirtualWorker
from dps.virtual.profile import Profile
from dps.virtual.threads import BlockingLoop, VirtualFuture

T = TypeVar("T")


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
