"""The status of a training, as the driver collects it.

The routing table, which arrives by itself, names the servers of each shard. The progress of shards
and workers is requested from the heads, only when the user looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dps.cluster.names import Node
from dps.cluster.node.audit import describe_all
from dps.cluster.scheduler.overview import most, staleness
from dps.core.blocks import ShardLayout
from dps.observe.history import EVALUATOR, History
from dps.observe.progress import Pace
from dps.observe.views import Listing, ShardView, TrainingView, WorkerView
from dps.protocol.client.routing_table import Router
from dps.protocol.group import Group
from dps.protocol.messages import Description, Table
from dps.protocol.transport import Clock, Transport

LOOK_SECONDS = 1.0  # a slower shard keeps its last known status


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


class TrainingWatch:
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
        self, group: Group, history: History, clock: Clock, before: Mapping[str, int]
    ) -> None:
        self._group = group
        self._history = history
        self._clock = clock
        self._before = before
        self._table: Table | None = None
        self._known: list[Description | None] = [None] * len(group.layout.shards)
        self._pace = Pace()
        self._seen = clock.monotonic()
        self.started: dict[str, Started] = {}
        self.stops = 0
        self._replaced: set[Any] = set()  # futures of workers that were started again since

    def open(self, router: Router, transport: Transport) -> None:
        """Start listening to the routing table."""
        self._router = router
        self._transport = transport
        router.listen(self._heard)

    async def look(self) -> None:
        """Request the status of all shards; those that do not answer soon keep their last one."""
        found = await describe_all(self._group, self._router, self._transport, LOOK_SECONDS)
        self._known = [new or old for new, old in zip(found, self._known, strict=True)]
        self._seen = self._clock.monotonic()
        self._pace.look(self._seen, self._updates() | self._versions())

    def submitted(self, worker: str, future: Any, only_on: str | None = None) -> None:
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
        found = (self._look_at(self.started[name]) for name in names)
        return [each.future for each in found if not each.ended]

    def failed(self, names: Sequence[str]) -> list[tuple[str, Any]]:
        """Return the named workers that have failed, and their futures."""
        found = [(name, self.started[name]) for name in names]
        return [(name, each.future) for name, each in found if each.ended == "failed"]

    def holding(self) -> list[str]:
        """The workers that hold a thread of a node, or wait for one, and were not stopped."""
        found = ((name, self._look_at(each)) for name, each in self.started.items())
        return [name for name, each in found if not each.ended and each.stops == self.stops]

    @property
    def futures(self) -> set[Any]:
        """The futures of workers that have not ended, or that failed, and may be retried."""
        held = {each.future for each in self.started.values() if each.future is not None}
        return held | self._replaced

    def let_go(self) -> None:
        """Note how workers have ended, and hold no future any more."""
        for each in self.started.values():
            self._look_at(each).future = None
        self._replaced.clear()

    def shards(self, nodes: Iterable[Node]) -> Listing[ShardView]:
        """Return the last known status of each shard."""
        names = {node.address: node.name for node in nodes}
        views = self._table.views if self._table else ()
        found = []
        for shard, (layout, known) in enumerate(
            zip(self._group.layout.shards, self._known, strict=True)
        ):
            chain = views[shard].chain if views and views[shard].serving else ()
            on = tuple(names.get(host.address, host.address) for host in chain)
            address = chain[0].address if chain else ""
            epoch = views[shard].epoch if views else 0
            version, nbytes = (
                (known.version, known.nbytes) if known else (None, self._least(layout))
            )
            head = on[0] if on else ""
            view = shard, head, on, version, epoch, nbytes, address, self._group.replicas
            rate = self._pace.of(_key(shard), self._seen, version) if version is not None else None
            found.append(ShardView(*view, rate, staleness(known)))
        return Listing(found)

    def workers(self) -> Listing[WorkerView]:
        """Return the last known status of each worker that was started."""
        updates = self._updates()
        clocks = self._clocks()
        return Listing(
            self._view(name, self._look_at(each), updates.get(name, each.before), clocks.get(name))
            for name, each in self.started.items()
        )

    def progress(
        self, names: Sequence[str], total: int | None, since: float | None, **more: Any
    ) -> TrainingView:
        """Return the progress of the named workers, out of `total` gradients.

        `since` is when the first of them began; `more` are other attributes of the view.
        """
        views = Listing(view for view in self.workers() if view.worker in names)
        done = sum(view.updates - self.started[view.worker].before for view in views)
        scores, seconds = self._history.last(EVALUATOR), None
        if since is not None:
            seconds = self._clock.monotonic() - since
        of_all = self._group.name, "running", self._clock.now(), done, total
        return TrainingView(*of_all, workers=views, scores=scores, seconds=seconds, **more)

    def _view(self, name: str, each: Started, updates: int, clock: int | None) -> WorkerView:
        status = each.ended
        if not status:
            status = "waiting" if clock is None else "running"
        rate = None
        if status == "running":
            rate = self._pace.of(name, self._seen, updates, each.at, each.before)
        reported = self._history.last(name)
        return WorkerView(name, status, updates, clock, rate, reported)

    def _look_at(self, each: Started) -> Started:
        each.look(self.stops)
        return each

    def _updates(self) -> dict[str, int]:
        """The number of updates of each worker, from the shard that has most of them."""
        return most(known.applied for known in self._known if known)

    def _clocks(self) -> dict[str, int]:
        return most(known.clocks for known in self._known if known)

    def _versions(self) -> dict[str, int]:
        return {_key(n): known.version for n, known in enumerate(self._known) if known}

    def _least(self, layout: ShardLayout) -> int:
        """The size in bytes of a shard whose tables have no rows."""
        return layout.nbytes * (1 + len(self._group.rule.slots))

    def _heard(self, table: Table) -> None:
        self._table = table


def _key(shard: int) -> str:
    return f"shard {shard}"
