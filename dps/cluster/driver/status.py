"""The status of a training, as the driver collects it, and what of it is shown to the user.

The routing table, which arrives by itself, names the servers of each shard. The progress of shards
and workers is requested from the heads, only when the user looks.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dps.cluster.driver.incidents import IncidentWatch
from dps.cluster.driver.setup import Start
from dps.cluster.driver.shard_hosts import ShardHosts
from dps.cluster.heads import Heads, most, shard_view
from dps.cluster.names import Node
from dps.cluster.platform import platform_of
from dps.core.ranges import brief
from dps.observe.history import EVALUATOR, History
from dps.observe.progress import Pace
from dps.observe.views import Listing, ShardView, TrainingView, WorkerView, missing_copies, size
from dps.protocol.client.routing_table import Router
from dps.protocol.messages import Description, Table, View

if TYPE_CHECKING:
    import distributed

LOOK_SECONDS = 1.0  # a slower shard keeps its last known status
ERROR_TEXT = 200  # characters of an error that are shown


@dataclass(slots=True)
class Started:
    """A worker that the driver started: when, after how many stops, with how many updates.

    `ended` is how it has ended; "" while it runs. Then its `future` is released, unless it failed,
    because it may be retried. `key` is the key of its Dask task. `only_on` names the only node that
    it may use; None: any node for workers.
    """

    at: float
    stops: int
    before: int
    future: Any
    key: str
    only_on: str | None
    ended: str = ""

    def may_use(self, node: Node) -> bool:
        """Whether it may run on a node for workers."""
        return self.only_on in (None, node.name)

    def look(self, stops: int) -> None:
        """Note whether and how it has ended; `stops` is how often the training has been stopped."""
        status = "pending" if self.future is None else self.future.status
        if status == "finished" or (status == "cancelled" and not self.ended):
            self.ended, self.future = status, None
        elif status == "error" and not self.ended:
            self.ended = "stopped" if self.stops < stops else "failed"
        elif status == "pending" and self.future is not None:
            self.ended = ""  # it may have failed before, and been retried


class TrainingStatus:
    """The workers of a group, and the last known status of its shards.

    `look` and `open` belong to the client's event loop; the rest may be called in any thread.

    Attributes
    ----------
    started
        Each worker that was started, by its name.
    stops
        How often the training was stopped.
    """

    def __init__(
        self,
        client: distributed.Client,
        start: Start,
        history: History,
        hosts: ShardHosts,
        incidents: IncidentWatch,
    ) -> None:
        self.started: dict[str, Started] = {}
        self.stops = 0
        self._group = group = start.group
        self._history = history
        # The router keeps this object, and must not keep a driver that nobody has any more.
        self._hosts: ShardHosts = weakref.proxy(hosts)
        self._incidents = incidents
        self._clock = platform_of(client).clock
        self._before = start.saved.applied if start.saved is not None else {}
        self._table: Table | None = None
        self._known: list[Description | None] = [None] * len(group.layout.shards)
        self._pace = Pace()
        self._seen = self._clock.monotonic()
        self._replaced: set[Any] = set()  # futures of workers that were started again since

    def open(self, router: Router) -> None:
        """Start listening to the routing table."""
        self._heads = Heads(self._group, router)
        router.listen(self._heard)

    async def look(self) -> None:
        """Request the status of all shards; those that do not answer soon keep their last one."""
        answers = await self._heads.describe_all(LOOK_SECONDS)
        self._known = [new or old for new, old in zip(answers, self._known, strict=True)]
        self._seen = self._clock.monotonic()
        versions = {_key(n): known.version for n, known in enumerate(self._known) if known}
        self._pace.look(self._seen, self._updates() | versions)

    # -- workers -------------------------------------------------------------------------------

    def submitted(self, worker: str, future: Any, only_on: str | None) -> None:
        """Note that a worker was started or restarted."""
        now, again = self._clock.monotonic(), self.started.get(worker)
        before = again.before if again else self._before.get(worker, 0)
        if again is not None and not self._look_at(again).ended:
            self._replaced.add(again.future)
        at = again.at if again else now
        each = Started(at, self.stops, before, future, future.key, only_on)
        self.started[worker] = each
        # At once, because a closed client treats every future as cancelled.
        future.add_done_callback(lambda _: self._look_at(each))

    def pending(self, names: Sequence[str]) -> list[Any]:
        """Return the futures of the named workers that have not ended."""
        workers = (self._look_at(self.started[name]) for name in names)
        return [each.future for each in workers if not each.ended]

    def holding(self) -> list[str]:
        """Return the workers that hold or wait for a thread of a node, and were not stopped."""
        workers = ((name, self._look_at(each)) for name, each in self.started.items())
        return [name for name, each in workers if not each.ended and each.stops == self.stops]

    @property
    def futures(self) -> set[Any]:
        """The futures of workers that have not ended, or that failed, and may be retried."""
        held = {each.future for each in self.started.values() if each.future is not None}
        return held | self._replaced

    def let_go(self) -> None:
        """Note how workers have ended, and release their futures."""
        for each in self.started.values():
            self._look_at(each).future = None
        self._replaced.clear()

    # -- what is shown ---------------------------------------------------------------------------

    def shards(self) -> Listing[ShardView]:
        """Return the last known status of each shard."""
        names = {node.address: node.name for node in self._hosts.nodes}
        nothing = [View(shard, 0, (), False) for shard in range(len(self._known))]
        return Listing(
            shard_view(
                self._group,
                view,
                known,
                lambda host: names.get(host.address, host.address),
                self._pace.of(_key(view.shard), self._seen, known.version) if known else None,
            )
            for view, known in zip(
                self._table.views if self._table else nothing, self._known, strict=True
            )
        )

    def workers(self) -> Listing[WorkerView]:
        """Return the last known status of each worker that was started."""
        updates = self._updates()
        clocks = most(known.clocks for known in self._known if known)
        return Listing(
            self._view(name, self._look_at(each), updates.get(name, each.before), clocks.get(name))
            for name, each in self.started.items()
        )

    def view(self, state: str) -> TrainingView:
        """Return an overview of the training; `state` is "running" or "closed"."""
        shards = self.shards()
        versions = [shard.version for shard in shards if shard.version is not None]
        lost, failovers = self._incidents.updates_lost, len(self._incidents.failovers)
        notes = [f"{lost:,} acknowledged updates were lost: see ps.losses"] if lost else []
        if failovers:
            number = f"{failovers} failovers" if failovers > 1 else "a failover"
            notes.append(f"there was {number}: see ps.failovers")
        return TrainingView(
            self._group.name,
            state,
            self._clock.now(),
            min(versions, default=None),
            shards=shards,
            workers=self.workers(),
            lost=lost,
            notes=(*notes, *missing_copies(shards)),
        )

    def progress(
        self, names: Sequence[str], total: int | None, since: float | None
    ) -> TrainingView:
        """Return the progress of the named workers, out of `total` gradients.

        `since` is when the first of them began.
        """
        views = Listing(view for view in self.workers() if view.worker in names)
        failed = [view.worker for view in views if view.status == "failed"]
        errors = [f"{n} failed: {_brief_error(self.started[n].future)}" for n in failed[:1]]
        failovers = map(str, self._incidents.failovers[-1:])
        return TrainingView(
            self._group.name,
            "running",
            self._clock.now(),
            sum(view.updates - self.started[view.worker].before for view in views),
            total,
            workers=views,
            scores=self._history.last(EVALUATOR),
            seconds=None if since is None else self._clock.monotonic() - since,
            lost=self._incidents.updates_lost,
            notes=(*errors, *missing_copies(self.shards()), *failovers),
        )

    @property
    def choices(self) -> Mapping[str, Any]:
        """The choices that were made for the group, by name."""
        group = self._group
        return {
            "optimizer": group.rule,
            "consistency": group.consistency,
            "recovery": group.recovery,
            **({"filters": group.filters} if group.filters else {}),
        }

    @property
    def parameters(self) -> int:
        """The number of parameters in arrays."""
        return sum(spec.size for spec in self._group.layout.arrays)

    @property
    def facts(self) -> dict[str, str]:
        """Arrays, tables, sizes and settings; the shards count the rows of tables, in bytes."""
        layout = self._group.layout
        return {
            "arrays": str(len(layout.arrays)),
            "tables": str(len(layout.tables)),
            "parameters": f"{self.parameters:,}",
            "size": size(sum(shard.nbytes for shard in layout.shards)),
            "shards": str(len(layout.shards)),
            **{name: brief(choice) for name, choice in self.choices.items()},
        }

    def _view(self, name: str, each: Started, updates: int, clock: int | None) -> WorkerView:
        status, rate = each.ended, None
        if not status:
            status = "waiting" if clock is None else "running"
        if status == "running":
            rate = self._pace.of(name, self._seen, updates, each.at, each.before)
        return WorkerView(name, status, updates, clock, rate, self._history.last(name))

    def _look_at(self, each: Started) -> Started:
        each.look(self.stops)
        return each

    def _updates(self) -> dict[str, int]:
        """Return the number of updates of each worker, from the shard that has most of them."""
        return most(known.applied for known in self._known if known)

    def _heard(self, table: Table) -> None:
        self._table = table


def _key(shard: int) -> str:
    return f"shard {shard}"


def _brief_error(future: Any) -> str:
    """Return the error of a future that failed, in a line."""
    error = future.exception()
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:ERROR_TEXT]}" if text else type(error).__name__
