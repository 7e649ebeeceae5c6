"""Records of failovers: one for each time that a shard lost replicas and is served again.

A record is complete only when its cost is known, for which workers are asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dps.events import Failover, Sink
from dps.protocol.coordinator.losses import Losses
from dps.protocol.group import Group
from dps.protocol.messages import Brought, View
from dps.protocol.transport import Clock, Endpoint

KEPT = 100
_OF_A_REPLICA = Brought("replica", 0, {})


@dataclass(slots=True)
class _Outage:
    """A shard that has lost replicas: since when, and what has happened since."""

    began: float
    by: str
    head: Endpoint | None
    lost: list[str] = field(default_factory=list)
    restored: tuple[int, Brought, str] | None = None  # epoch, source and cause
    served: float | None = None


class Failovers:
    """The failovers of a group: the `count` of all, and the last ones. Used from one event loop.

    `node` returns the name of a host's node.
    """

    def __init__(
        self,
        group: Group,
        clock: Clock,
        emit: Sink,
        losses: Losses,
        node: Callable[[Endpoint], str],
    ) -> None:
        self.found: deque[Failover] = deque(maxlen=KEPT)
        self.count = 0
        self._group = group
        self._clock = clock
        self._emit = emit
        self._losses = losses
        self._node = node
        self._heads: dict[int, Endpoint] = {}
        self._outages: dict[int, _Outage] = {}

    def lost(self, shard: int, node: str, by: str) -> None:
        """Note that a shard has lost a replica."""
        began, head = self._clock.monotonic(), self._heads.get(shard)
        outage = self._outages.setdefault(shard, _Outage(began, by, head))
        if node not in outage.lost:
            outage.lost.append(node)

    def restored(self, shard: int, epoch: int, brought: Brought) -> str:
        """Note that a shard was restored; return the cause."""
        cause = self._cause(shard, brought.source)
        if shard in self._outages:
            self._outages[shard].restored = epoch, brought, cause
        return cause

    @property
    def await_cost(self) -> bool:
        """Whether a shard is served again, but the cost is not known yet."""
        return any(outage.served is not None for outage in self._outages.values())

    def look(self, views: Sequence[View]) -> None:
        """Record the failovers that are over and whose cost is known."""
        for view in views:
            outage = self._outages.get(view.shard)
            if outage is not None and not view.serving:
                outage.served = None
            elif outage is not None:
                outage.served = outage.served or self._clock.monotonic()
                if outage.restored is None or self._losses.is_settled:
                    self._end(view, outage, outage.served)
            if view.serving:
                self._heads[view.shard] = view.chain[0]

    def _end(self, view: View, outage: _Outage, served: float) -> None:
        epoch, brought, cause = outage.restored or (view.epoch, _OF_A_REPLICA, "")
        cost = {(loss.shard, loss.epoch): loss for loss in self._losses.found}
        loss = cost.get((view.shard, epoch))
        failover = Failover(
            self._clock.now(),
            view.shard,
            epoch,
            ", ".join(outage.lost),
            outage.by,
            served - outage.began,
            self._node(view.chain[0]),
            view.chain[0] != outage.head,
            len(view.chain),
            self._group.replicas,
            brought.source,
            brought.version,
            cause,
            loss.updates if loss is not None else 0,
            loss is None or loss.exact,
        )
        del self._outages[view.shard]
        self.count += 1
        self.found.append(failover)
        self._emit(failover)

    def _cause(self, shard: int, source: str) -> str:
        group = self._group
        if shard not in self._outages and group.restores_together:
            return "another shard was lost, and all go back together"
        if group.replicas > 1:
            return f"all {group.replicas} copies were gone"
        if source != "initial":
            return "its server was lost"
        other = "the state store too" if group.recovery.needs_store else "nothing kept its state"
        return f"its server was lost and {other}"
