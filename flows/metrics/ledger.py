"""The ledger of updates: which applications survived, which were lost, which happened twice.

A shard's history is a line of versions that a failure may cut back: a restored copy or a promoted
replica holds version r, and all updates that earlier epochs applied after r are lost. The remaining
versions are the *surviving lineage*. All counts here are of one update on one shard: a gradient
that is pushed to two shards counts twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from dps.core.updates import UpdateId
from dps.events import Acked, Applied, Promoted, Replayed, Restored
from flows.metrics.faults import FaultTimes
from flows.records.events import Audited
from flows.records.record import Record

Key = tuple[int, UpdateId]  # one update on one shard
# From its epoch on, the shard continues from its version; later updates of older epochs are lost.
Cut = Restored | Promoted


class Row(NamedTuple):
    """One application of one update by one replica of a shard."""

    t: float
    shard: int
    epoch: int
    version: int
    id: UpdateId
    head: bool
    replayed: bool
    staleness: int
    staleness_seconds: float

    @property
    def key(self) -> Key:
        """The update on its shard."""
        return self.shard, self.id


class Ack(NamedTuple):
    """One answer to a push on one shard, as a worker received it."""

    t: float
    version: int
    key: Key
    outcome: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """The outcomes of the updates of a trial: counts, as `flows.metrics.updates` defines them.

    `unrecorded` are updates in the final state whose application was never reported, because the
    node that applied them was killed first.
    """

    acked: int
    applied: int
    lost: int
    buffered: int
    replayed: int
    dropped: int
    duplicates: int
    applied_twice: int
    replica_conflicts: int
    audit_mismatches: int
    lost_per_fault: int | None
    unrecorded: int


def ledger(record: Record, rows: Sequence[Row], faults: Sequence[FaultTimes]) -> Ledger:
    """Return the outcome of every update of a trial; `rows` are its `applied_rows`."""
    acks = list(_acks(record))
    # In order of time, the start of the run included.
    cuts: list[Cut] = [*record.of(Restored), *record.of(Promoted)]
    cuts.sort(key=lambda cut: cut.t)
    surviving = _survivors(rows, cuts)
    durable = [ack for ack in acks if ack.outcome in ("applied", "duplicate")]
    acked = {ack.key for ack in durable}
    buffered = {ack.key for ack in acks if ack.outcome == "buffered"}
    replays = record.of(Replayed)
    kept = {row.key for row in surviving}
    final = _final_versions(record, surviving)
    unrecorded = Counter(final)
    unrecorded.subtract(shard for shard, _ in {(row.shard, row.version) for row in surviving})
    lost = _lost_acked(rows, kept, durable, cuts)
    # Acked updates that were not reported and are not lost are among the unrecorded versions.
    room = unrecorded - Counter(shard for shard, _ in acked - kept - lost.keys())
    settled = kept | {ack.key for ack in acks if ack.outcome != "buffered"}
    lost |= _lost_buffered(acks, rows, cuts, replays, settled, room)
    outcomes = Counter(ack.outcome for ack in acks)
    # A loss belongs to the last fault that began before it, and without one to none.
    began = [fault.began for fault in faults]
    by_fault = Counter(bisect_right(began, t) for t in lost.values())
    versions: defaultdict[Key, set[int]] = defaultdict(set)
    at_version: defaultdict[tuple[int, int], set[UpdateId]] = defaultdict(set)
    for row in surviving:
        versions[row.key].add(row.version)
        at_version[row.shard, row.version].add(row.id)
    return Ledger(
        acked=len(acked),
        applied=sum(final.values()),
        lost=len(lost),
        buffered=len(buffered),
        replayed=sum(replay.count for replay in replays),
        dropped=outcomes["dropped"] + sum(replay.dropped for replay in replays),
        duplicates=outcomes["duplicate"] + sum(replay.duplicates for replay in replays),
        applied_twice=sum(len(each) - 1 for each in versions.values()),
        replica_conflicts=sum(len(each) > 1 for each in at_version.values()),
        audit_mismatches=_audit_mismatches(record, kept, acks),
        lost_per_fault=max((by_fault[n] for n in range(1, len(began) + 1)), default=None),
        unrecorded=unrecorded.total(),
    )


# -- columns to rows -------------------------------------------------------------------------


def applied_rows(record: Record) -> Iterator[Row]:
    """Yield every recorded application, of heads and of other replicas."""
    for batch in record.of(Applied):
        columns = zip(
            batch.times,
            batch.versions,
            map(UpdateId, batch.workers, batch.incarnations, batch.seqs),
            batch.replayed,
            batch.staleness,
            batch.staleness_seconds,
            strict=True,
        )
        for t, version, update, replayed, staleness, seconds in columns:
            at = t, batch.shard, batch.epoch, version
            yield Row(*at, update, batch.head, replayed, staleness, seconds)


def _acks(record: Record) -> Iterator[Ack]:
    for batch in record.of(Acked):
        columns = zip(
            batch.times, batch.shards, batch.versions, batch.seqs, batch.outcomes, strict=True
        )
        for t, shard, version, seq, outcome in columns:
            yield Ack(t, version, (shard, UpdateId(batch.worker, batch.incarnation, seq)), outcome)


# -- the surviving lineage -------------------------------------------------------------------


def _survivors(rows: Iterable[Row], cuts: Iterable[Cut]) -> list[Row]:
    """The applications that are part of the final state.

    An application survives when every later epoch of its shard continued from its version or a
    later one.
    """
    by_shard: defaultdict[int, list[Cut]] = defaultdict(list)
    for cut in cuts:
        by_shard[cut.shard].append(cut)
    return [
        row
        for row in rows
        if all(cut.epoch <= row.epoch or row.version <= cut.version for cut in by_shard[row.shard])
    ]


def _lost_acked(
    rows: Iterable[Row], kept: Collection[Key], durable: Iterable[Ack], cuts: Sequence[Cut]
) -> dict[Key, float]:
    """The acked updates that a later cut removed and nothing brought back, with its moment.

    An acked update without a recorded application is judged by the version in its ack: the node
    that applied it may have been killed before it reported.
    """
    versions = {row.key: row.version for row in rows}
    lost: dict[Key, float] = {}
    for ack in durable:
        if ack.key not in kept:
            version = ack.version
            if ack.outcome == "duplicate":  # its version is that of the shard, not of the update
                version = versions.get(ack.key, version)
            shard = ack.key[0]
            after = (cut for cut in cuts if cut.shard == shard and cut.t > ack.t)
            removed = next((cut.t for cut in after if cut.version < version), None)
            if removed is not None:
                lost.setdefault(ack.key, removed)
    return lost


def _lost_buffered(
    acks: Iterable[Ack],
    rows: Iterable[Row],
    cuts: Sequence[Cut],
    replays: Sequence[Replayed],
    settled: Collection[Key],
    unrecorded: Mapping[int, int],
) -> dict[Key, float]:
    """The buffered updates that are in no final state, and when their shard lost them.

    That moment is when the shard next continued from another state, infinity if it never did.

    Parameters
    ----------
    settled
        The updates whose outcome is known.
    unrecorded
        By shard, the number of versions of the final state that may be any update: their
        application was never reported. This number of updates does not count as lost.
    """
    # When each was last known to be there: buffered, or applied for a time.
    since = {a.key: a.t for a in acks if a.outcome == "buffered" and a.key not in settled}
    for row in rows:
        if row.key in since:
            since[row.key] = max(since[row.key], row.t)
    lost: dict[Key, float] = {}
    for shard in {shard for shard, _ in since}:
        waiting = sorted((key for key in since if key[0] == shard), key=since.__getitem__)
        for replay in replays:
            if replay.shard == shard:
                # It records how many it left out, not which: take those buffered nearest to it.
                nearest = sorted(waiting, key=lambda key: abs(since[key] - replay.t))
                gone = frozenset(nearest[: replay.dropped])
                waiting = [key for key in waiting if key not in gone]
        for key in waiting[unrecorded.get(shard, 0) :]:
            moments = (cut.t for cut in cuts if cut.shard == shard and cut.t > since[key])
            lost[key] = next(moments, inf)
    return lost


# -- the final state -------------------------------------------------------------------------


def _final_versions(record: Record, surviving: Iterable[Row]) -> dict[int, int]:
    """Each shard's last version: as audited, otherwise the last of the surviving lineage."""
    final: dict[int, int] = {}
    for row in surviving:
        final[row.shard] = max(final.get(row.shard, 0), row.version)
    for audit in sorted(record.of(Audited), key=lambda audit: audit.epoch):
        final[audit.shard] = audit.version
    return final


def _audit_mismatches(record: Record, kept: Iterable[Key], acks: Iterable[Ack]) -> int:
    """Count the audited final states that contradict the events.

    The number of updates must equal the version; no worker may have more updates in the state
    than it is known to have sent, or fewer than the surviving lineage shows.
    """
    least, sent = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    least.update((shard, update.worker) for shard, update in kept)
    sent.update((shard, update.worker) for shard, update in {*kept, *(ack.key for ack in acks)})
    return sum(
        audit.version != sum(audit.applied.values())
        or not all(
            least[audit.shard, worker] <= audit.applied.get(worker, 0) <= sent[audit.shard, worker]
            for worker in {*audit.applied, *(w for shard, w in least if shard == audit.shard)}
        )
        for audit in record.of(Audited)
    )
