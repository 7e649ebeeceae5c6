"""How far a group is, how fast, and how stale its updates are: what comes of looks at it."""

from __future__ import annotations

from collections import deque

from dps.cluster.scheduler.overview import GroupOverview, ShardState, WorkerState
from dps.observe.progress import WINDOW_SECONDS, Pace


class GroupRates:
    """Rates of the shards and workers of one group, from looks at it; none after the first.

    What a shard that is down or late was last known to have still counts.
    """

    def __init__(self) -> None:
        self._pace = Pace()
        self._began: float | None = None
        self._now = 0.0
        self._looks = 0
        self._counted: dict[int, deque[tuple[float, int, int]]] = {}
        self._versions: dict[int, int | None] = {}  # as last known, by shard

    def look(self, group: GroupOverview) -> None:
        """Take in how it stands with the group now."""
        self._looks += 1
        self._began = group.t if self._began is None else self._began
        self._now = group.t
        counts = {worker.worker: worker.updates for worker in group.workers}
        versions = {_key(s): s.version for s in group.shards if s.version is not None}
        self._pace.look(group.t, {**counts, **versions})
        for shard in group.shards:
            self._count(shard)
            known = self._versions.get(shard.shard)
            self._versions[shard.shard] = known if shard.version is None else shard.version

    @property
    def updates(self) -> int | None:
        """Updates that every shard has applied, as last known; None: one was never heard of."""
        known = [version for version in self._versions.values() if version is not None]
        return min(known) if known and len(known) == len(self._versions) else None

    def of_shard(self, shard: ShardState) -> float | None:
        """Updates a second of a shard, over the last ten seconds or so."""
        return self._rate(_key(shard), shard.version)

    def of_worker(self, worker: WorkerState) -> float | None:
        """Gradients of a worker that are applied a second, over the last ten seconds or so."""
        return self._rate(worker.worker, worker.updates) if worker.active else None

    def staleness(self, shard: ShardState) -> float | None:
        """Versions that a shard's updates of the last ten seconds or so had missed on average."""
        counted = self._counted.get(shard.shard)
        if not counted:
            return None
        (_, first, before), (_, last, after) = counted[0], counted[-1]
        return (after - before) / (last - first) if last > first else None

    def _count(self, shard: ShardState) -> None:
        if shard.updates is None or shard.missed is None:
            return
        counted = self._counted.setdefault(shard.shard, deque())
        if counted and shard.updates < counted[-1][1]:  # another head, which counts its own
            counted.clear()
        counted.append((self._now, shard.updates, shard.missed))
        while len(counted) > 2 and counted[1][0] <= self._now - WINDOW_SECONDS:
            counted.popleft()

    def _rate(self, name: str, count: int | None) -> float | None:
        if self._looks < 2 or count is None or self._began is None:
            return None
        return self._pace.of(name, self._now, count, self._began, count)


def _key(shard: ShardState) -> str:
    return f"shard {shard.shard}"
