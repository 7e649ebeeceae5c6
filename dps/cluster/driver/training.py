"""The workers of a group as the driver starts them, and the status that is shown to the user."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distributed import KilledWorker

from dps.cluster.driver.news import IncidentWatch
from dps.cluster.driver.runs import (
    check_threads,
    copies_of,
    is_collection,
    must_be_sent,
    partitions_of,
    processing,
    refuse_futures,
    shares_of,
    sizes_of,
)
from dps.cluster.driver.setup import Start
from dps.cluster.driver.shard_hosts import ShardHosts
from dps.cluster.heads import ask_heads, shard_view
from dps.cluster.names import Node
from dps.cluster.node.batches import Leases
from dps.cluster.node.worker import Place
from dps.cluster.node.worker_task import run_worker
from dps.cluster.platform import platform_of
from dps.core.arguments import check_function
from dps.core.functions import most
from dps.core.leases import Division, examples_of
from dps.core.ranges import brief, integer_argument, listed, shown
from dps.errors import CapacityError, ConfigurationError, TrainingStopped
from dps.observe.history import EVALUATOR, History
from dps.observe.views import (
    Listing,
    Pace,
    ShardView,
    TrainingView,
    WorkerView,
    missing_copies,
    size,
)
from dps.protocol.messages import Description, RunEnded, View

if TYPE_CHECKING:
    import distributed

LOOK_SECONDS = 1.0  # a slower shard keeps its last known status
POLL_SECONDS = 0.1
ERROR_TEXT = 200  # characters of an error that are shown
_GONE = {"lost", "cancelled", "error"}  # states of futures that have no data any more
_LOST = (KilledWorker, CapacityError)  # errors of workers whose node, or whose data, was lost


# A worker's partitions of the data, or all of it, of which it leases batches.
Share = Sequence[Any] | Leases | None


@dataclass(slots=True)
class Started:
    """A worker that the driver started."""

    key: str  # of its task, which Dask runs again if the result is lost with its node
    at: float
    stops: int  # how often the training had been stopped
    before: int  # its updates in the checkpoints that were resumed
    future: Any  # None when it has ended; kept if it failed: it may be retried
    share: Share
    only_on: str | None  # the only node that it may use; None: any node for workers
    ended: str = ""  # "finished", "cancelled", "stopped" or "failed"; "": it has not

    def look(self, stops: int) -> None:
        """Note whether and how it has ended; `stops` counts the stops of the training so far."""
        status = None if self.future is None else self.future.status
        if status == "finished" or (status == "cancelled" and not self.ended):
            self.ended, self.future = status, None
        elif status == "error" and not self.ended:
            self.ended = "stopped" if self.stops < stops else "failed"
        elif status == "pending":
            self.ended = ""  # it may have failed before, and been retried


class Training:
    """Starts the workers of a group, and keeps the last known status of workers and shards."""

    def __init__(
        self,
        client: distributed.Client,
        start: Start,
        hosts: ShardHosts,
        incidents: IncidentWatch,
        history: History,
    ) -> None:
        self.started: dict[str, Started] = {}  # by name
        self.stops = 0  # how often the training was stopped
        self._client = client
        self._group = start.group
        self._history = history
        # Callbacks of running workers keep this object; they must not keep an unused driver alive.
        self._hosts: ShardHosts = weakref.proxy(hosts)
        self._incidents = incidents
        self._clock = platform_of(client).clock
        self._before = start.saved.applied if start.saved is not None else {}
        self._known: list[Description | None] = [None] * len(start.group.layout.shards)
        self._pace = Pace()
        self._seen = self._clock.monotonic()
        self._last_run: list[str] = []
        # The last data that was leased, its futures, and the key under which it is sent.
        self._sent: tuple[Any, list[Any], str] | None = None
        self._replaced: set[Any] = set()  # earlier futures of restarted workers

    # In the client's event loop; any thread may call the other methods.
    async def look(self) -> None:
        """Request the status of all shards; those that do not answer soon keep their last one."""
        answers = await ask_heads(self._hosts.router, LOOK_SECONDS)
        self._known = [new or old for new, old in zip(answers, self._known, strict=True)]
        self._seen = self._clock.monotonic()
        versions = {f"shard {n}": known.version for n, known in enumerate(self._known) if known}
        self._pace.look(self._seen, self._updates() | versions)

    # -- workers -------------------------------------------------------------------------------

    def run(
        self,
        train: Callable[..., Any],
        workers: int,
        data: Any = None,
        division: Division | None = None,
    ) -> list[Any]:
        """Start workers: see `ParameterServer.run`."""
        workers = integer_argument("workers", workers, 1, "workers")
        arguments = [] if data is None else ["data" if division is None else "batches"]
        nodes = self._check(train, arguments, workers)
        shares: Sequence[Share] = [None] * workers
        if division is not None:
            run = platform_of(self._client).token()
            shares = [self._leases(run, data, division, nodes)] * workers
        elif data is not None:
            addresses = [node.address for node in nodes]
            shares = shares_of(self._client, data, workers, addresses)
        return self._start(train, shares)

    def run_on_all(
        self,
        train: Callable[..., Any],
        data: Any,
        division: Division,
        ask: Callable[[RunEnded], bool],
    ) -> list[Any]:
        """Run workers on all threads for workers until every batch is applied."""
        client, platform = self._client, platform_of(self._client)
        run, stops, futures = platform.token(), self.stops, list[Any]()
        try:
            while not ask(RunEnded(run)):
                if self.stops != stops:
                    raise TrainingStopped("stopped by ps.stop()")
                try:
                    nodes = self._check(train, ["batches"], 1)
                    futures += self._start(train, [self._leases(run, data, division, nodes)])
                    if any(future.status == "finished" for future in futures):
                        platform.sleep(LOOK_SECONDS)  # `train` may return early each time
                except CapacityError:  # no thread is free
                    platform.sleep(POLL_SECONDS)
                for future in futures:
                    if future.status == "error" and not isinstance(future.exception(), _LOST):
                        future.result()
            while (left := [f for f in futures if not f.done()]) and self.stops == stops:
                if hasattr(client, "processing"):
                    # Lost workers that Dask starts again may wait for a node. Those that have just
                    # ended do not; the client may learn it later than the scheduler.
                    begun = processing(client, self._hosts.for_workers)
                    ended = client.who_has(left)
                    begun |= {key for key, holders in ended.items() if holders}
                    client.cancel([future for future in left if future.key not in begun])
                platform.sleep(POLL_SECONDS)
        finally:
            if left := [future for future in futures if not future.done()]:
                client.sync(client.cancel, left)
        return [future for future in futures if future.status == "finished"]

    def add(self, train: Callable[..., Any]) -> Any:
        """Start one more worker: see `ParameterServer.add_worker`."""
        started = [each for _, each in self._current()]
        others = [each for each in started if not each.ended] or started
        leases = others[-1].share if others and isinstance(others[-1].share, Leases) else None
        nodes = self._check(train, [] if leases is None else ["batches"], 1)
        if leases is not None and self._sent is not None and leases.keys == _keys(self._sent[1]):
            leases = self._leases(leases.run, self._sent[0], leases.division, nodes)
        return self._start(train, [leases])[0]

    def divide(
        self, train: Callable[..., Any], workers: object, data: Any, *settings: Any
    ) -> Division:
        """Divide data into batches; the partitions of a collection are computed first."""
        division = Division(1, *settings)
        if not is_collection(data):
            return replace(division, examples=examples_of(data))
        if self._client.asynchronous:
            raise ConfigurationError(
                "data is a Dask collection, whose batches need a client that is not asynchronous"
            )
        # Before the partitions are computed, which may take long.
        count = 0 if workers == "all" else integer_argument("workers", workers, 1, "workers")
        nodes = self._check(train, ["batches"], count)
        sizes = tuple(sizes_of(self._client, self._sent_for(data, nodes)))
        return replace(division, examples=sum(sizes), partitions=sizes)

    def _leases(self, run: str, data: Any, division: Division, nodes: Sequence[Node]) -> Leases:
        """Return what workers need to lease batches."""
        keys = _keys(self._sent_for(data, nodes))
        return Leases(run, division, keys=keys) if keys else Leases(run, division, data)

    def _sent_for(self, data: Any, nodes: Sequence[Node]) -> list[Any]:
        """Send data to nodes once, and again if a copy is lost; return its futures."""
        if self._sent is None or self._sent[0] is not data:
            self._sent = data, [], f"dps-data-{platform_of(self._client).token()}"
        _, futures, key = self._sent
        if not futures or any(future.status in _GONE for future in futures):
            addresses = [node.address for node in nodes]
            if is_collection(data):
                futures = partitions_of(self._client, data, addresses)
            else:
                futures = copies_of(self._client, data, key, addresses)
            self._sent = data, futures, key
        return futures

    def _check(self, train: Callable[..., Any], given: Sequence[str], workers: int) -> list[Node]:
        """Refuse a function that cannot be called, and too many workers; return the nodes."""
        refuse_futures(train)
        check_function("train", train, ["worker", *given])
        nodes = self._hosts.for_workers
        check_threads(self._client, nodes, workers, self._group.name, self.holding())
        return nodes

    def _start(self, train: Callable[..., Any], shares: Sequence[Share]) -> list[Any]:
        first = len(self.started)
        self._last_run = peers = [f"worker-{first + index}" for index in range(len(shares))]
        return [self._submit(train, peers, index, share) for index, share in enumerate(shares)]

    def run_again(self, train: Callable[..., Any], worker: str, node: str) -> Any:
        """Restart a worker: see `ParameterServer.run_again`."""
        return self._submit(train, [worker], 0, self.of_name(worker).share, node)

    def of_name(self, worker: object) -> Started:
        """Return a worker that was started; raises `ConfigurationError` if none has this name."""
        if not isinstance(worker, str) or worker not in self.started:
            there = f"there are {listed(self.started)}" if self.started else "none was started"
            raise ConfigurationError(f"no worker is named {shown(worker)}; {there}")
        return self.started[worker]

    def pending(self, names: Sequence[str]) -> list[Any]:
        """Return the futures of the named workers that have not ended."""
        return [each.future for name, each in self._current() if name in names and not each.ended]

    def holding(self) -> list[str]:
        """Return the workers that hold or wait for a thread of a node, and were not stopped."""
        return [n for n, each in self._current() if not each.ended and each.stops == self.stops]

    def latest(self) -> list[str]:
        """Return the workers that have not ended; if there is none, those of the last run."""
        return [name for name, each in self._current() if not each.ended] or self._last_run

    @property
    def futures(self) -> set[Any]:
        """The futures of workers that have not ended, or that failed, and may be retried."""
        held = {each.future for each in self.started.values() if each.future is not None}
        return held | self._replaced

    def let_go(self) -> None:
        """Note how workers have ended, and release their futures and data."""
        for _, each in self._current():
            each.future = each.share = None
        self._replaced.clear()
        self._sent = None

    def _submit(
        self,
        train: Callable[..., Any],
        peers: Sequence[str],
        index: int,
        share: Share,
        only_on: str | None = None,
    ) -> Any:
        nodes = [n for n in self._hosts.for_workers if only_on in (None, n.name)]
        if not nodes:
            raise ConfigurationError(f"no node for workers is named {only_on!r}")
        name = peers[index]
        place = Place(peers, index, {node.address: node.name for node in nodes}, self.stops)
        with must_be_sent("train", "worker"):
            future = self._client.submit(
                run_worker,
                self._group,
                train,
                place,
                share,
                key=f"dps-{name}-{self._group.name}-{platform_of(self._client).token()}",
                workers=list(place.nodes),
                resources={"worker": 1} if nodes[0].resource else None,
                pure=False,
            )
        at, before = self._clock.monotonic(), self._before.get(name, 0)
        if (again := self.started.get(name)) is not None:
            at, before = again.at, again.before
            again.look(self.stops)
            if not again.ended:
                self._replaced.add(again.future)
        self.started[name] = each = Started(
            future.key, at, self.stops, before, future, share, only_on
        )
        # At once, because a closed client treats every future as cancelled.
        future.add_done_callback(lambda _: each.look(self.stops))
        return future

    def _current(self) -> list[tuple[str, Started]]:
        workers = list(self.started.items())
        for _, each in workers:
            each.look(self.stops)
        return workers

    # -- what is shown ---------------------------------------------------------------------------

    def shards(self) -> Listing[ShardView]:
        """Return the last known status of each shard."""
        names = {node.address: node.name for node in self._hosts.nodes}
        nothing = [View(shard, 0, (), False) for shard in range(len(self._known))]
        views = self._incidents.views or nothing
        return Listing(
            shard_view(
                self._group,
                view,
                known,
                lambda host: names.get(host.address, host.address),
                self._pace.of(f"shard {n}", self._seen, known.version) if known else None,
            )
            for n, (view, known) in enumerate(zip(views, self._known, strict=True))
        )

    def workers(self) -> Listing[WorkerView]:
        """Return the last known status of each worker that was started."""
        updates = self._updates()
        clocks = most(known.clocks for known in self._known if known)
        views = []
        for name, each in self._current():
            clock, done, rate = clocks.get(name), updates.get(name, each.before), None
            status = each.ended or ("waiting" if clock is None else "running")
            if status == "running":
                rate = self._pace.of(name, self._seen, done, each.at, each.before)
            views.append(WorkerView(name, status, done, clock, rate, self._history.last(name)))
        return Listing(views)

    def overview(self, closed: bool) -> TrainingView:
        """Return an overview of the training."""
        versions = [shard.version for shard in self.shards() if shard.version is not None]
        lost, failovers = self._incidents.updates_lost, len(self._incidents.failovers)
        notes = [f"{lost:,} acknowledged updates lost: see ps.losses"] if lost else []
        notes += [f"failovers: {failovers}, see ps.failovers"] if failovers else []
        state, done = "closed" if closed else "running", min(versions, default=None)
        return self._view(self.workers(), done, notes, state=state, shards=self.shards())

    def progress(
        self, names: Sequence[str], total: int | None, since: float | None
    ) -> TrainingView:
        """Return the progress of workers to `total` gradients; `since` is when they started."""
        workers = Listing(worker for worker in self.workers() if worker.worker in names)
        failed = [each.worker for each in workers if each.status == "failed"]
        notes = [f"{n} failed: {_brief_error(self.started[n].future)}" for n in failed[:1]]
        notes += map(str, self._incidents.failovers[-1:])
        done = sum(each.updates - self.started[each.worker].before for each in workers)
        seconds = None if since is None else self._clock.monotonic() - since
        scores = self._history.last(EVALUATOR)
        return self._view(workers, done, notes, total=total, seconds=seconds, scores=scores)

    def _view(
        self, workers: Listing[WorkerView], done: int | None, notes: Sequence[str], **more: Any
    ) -> TrainingView:
        more = {"state": "running", "lost": self._incidents.updates_lost, **more}
        more["notes"] = (*notes, *missing_copies(self.shards()))
        return TrainingView(
            self._group.name, t=self._clock.now(), done=done, workers=workers, **more
        )

    @property
    def choices(self) -> dict[str, Any]:
        """The choices that were made for the group, by name, and its sizes."""
        group = self._group
        return {
            "parameters": sum(spec.size for spec in group.layout.arrays),
            "shards": len(group.layout.shards),
            "optimizer": group.rule,
            "consistency": group.consistency,
            "recovery": group.recovery,
            **({"filters": group.filters} if group.filters else {}),
        }

    @property
    def facts(self) -> dict[str, str]:
        """Arrays, tables, sizes and settings; the shards count the rows of tables, in bytes."""
        layout = self._group.layout
        facts = {"arrays": str(len(layout.arrays)), "tables": str(len(layout.tables))}
        facts["size"] = size(sum(shard.nbytes for shard in layout.shards))
        for name, choice in self.choices.items():
            facts[name] = f"{choice:,}" if isinstance(choice, int) else brief(choice)
        if layout.tables:
            facts["parameters"] += " and the rows of tables"
        return facts

    def _updates(self) -> dict[str, int]:
        return most(known.applied for known in self._known if known)


def _keys(futures: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(future.key for future in futures)


def _brief_error(future: Any) -> str:
    error = future.exception()
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:ERROR_TEXT]}" if text else type(error).__name__
