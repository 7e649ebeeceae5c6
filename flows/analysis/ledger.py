"""The ledger of updates: which applications survived, which were lost, which happened twice.

A shard's history is a line of versions that a failure may cut back: a restored copy or a promoted
replica holds version r, and whatever earlier epochs applied after r is gone. What is left is the
*surviving lineage*. All counts here are of one update on one shard: a gradient that is pushed to
two shards counts twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from dps.core.updates import UpdateId
from dps.events import Acked, Applied, Audited, Promoted, Replayed, Restored
from flows.analysis.faults import fault_times
from flows.records.record import Record

Key = tuple[int, UpdateId]  # one update on one shard


def lost_buffered(
    acks: Iterable[Ack],
    rows: Iterable[Row],
    cuts: Sequence[Truncation],
    replays: Sequence[Replayed],
    settled: Collection[Key],
    unrecorded: Mapping[int, int],
) -> dict[Key, float]:
    """Return the buffered updates that are in no final state, and when their shard was without.

    That moment is when the shard next went on from another state, infinity if it never did.

    Parameters
    ----------
    settled
        The updates of which it is known what became of them.
    unrecorded
        By shard, versions of the final state that may be any update: their application was never
        reported. As many updates are not taken for lost.
    """
    since = _last_known(acks, rows, settled)
    lost: dict[Key, float] = {}
    for shard in {shard for shard, _ in since}:
        moments = [cut.t for cut in cuts if cut.shard == shard]
        left_out = [(r.t, r.dropped) for r in replays if r.shard == shard]
        waiting = _without_dropped([key for key in since if key[0] == shard], since, left_out)
        for key in waiting[unrecorded.get(shard, 0) :]:
            lost[key] = min((t for t in moments if t > since[key]), default=inf)
    return lost


def _last_known(
    acks: Iterable[Ack], rows: Iterable[Row], settled: Collection[Key]
) -> dict[Key, float]:
    """When each unsettled update was last known to be there: buffered, or applied for a time."""
    since: dict[Key, float] = {}
    for ack in acks:
        if ack.outcome == "buffered" and (ack.shard, ack.id) not in settled:
            since[ack.shard, ack.id] = ack.t
    for row in rows:
        key = row.shard, row.id
        if key in since:
            since[key] = max(since[key], row.t)
    return since


def _without_dropped(
    keys: Iterable[Key], since: Mapping[Key, float], left_out: Iterable[tuple[float, int]]
) -> list[Key]:
    """Updates in order of time, but for those that replay policies left out.

    A replay tells how many it left out, not which: those that were buffered nearest to it.
    """
    waiting = sorted(keys, key=lambda key: since[key])
    for t, dropped in left_out:
        nearest = sorted(waiting, key=lambda key: abs(since[key] - t))
        gone = frozenset(nearest[:dropped])
        waiting = [key for key in waiting if key not in gone]
    return waiting


@dataclass(frozen=True, slots=True)
class Row:
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


@dataclass(frozen=True, slots=True)
class Ack:
    """One push on one shard that a worker was told is safe."""

    t: float
    shard: int
    version: int
    id: UpdateId
    outcome: str


@dataclass(frozen=True, slots=True)
class Truncation:
    """From `epoch` on, the shard goes on from `version`; what older epochs did later is lost."""

    t: float
    shard: int
    epoch: int
    version: int

    def removes(self, shard: int, version: int) -> bool:
        """Whether an update that was applied before at this version is left out."""
        return self.shard == shard and self.version < version


@dataclass(frozen=True, slots=True)
class Ledger:
    """What became of the updates of a trial, in updates per shard, summed over shards.

    Attributes
    ----------
    attempted
        Different updates that appear in any acknowledgement or application.
    acked
        Different updates that a worker was told are durable ("applied" or "duplicate").
    applied
        Updates in the final state: the shards' last versions.
    lost
        Updates that a worker took for safe and that are not in the final state: acked ones that a
        restore or promotion left out and that no later application brought back, and buffered
        ones that are neither applied nor dropped, because the mailbox, or the worker, that kept
        them was lost.
    buffered
        Different updates that were kept in a mailbox or worker during an outage. Not in `acked`.
    replayed
        Buffered updates that were applied after the outage.
    dropped
        Updates that were given up: buffered ones that the replay policy left out, and those that
        a shard refused as too stale.
    duplicates
        Pushes refused because the shard had them: answers to workers, and refusals in replays.
    applied_twice
        Applications beyond the first of the same update in the surviving lineage. Must be 0.
    replica_conflicts
        Versions in the surviving lineage at which two replicas applied different updates. Must
        be 0.
    audit_mismatches
        Audits of final states that contradict the events. Must be 0.
    lost_per_fault
        The most updates that one fault lost: what recovery points were worth (RPO). None
        without a fault.
    unrecorded
        Versions of the final state whose application is not in the record, because the node that
        applied them was killed before it could report them.
    """

    attempted: int
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


def ledger(record: Record) -> Ledger:
    """Return what became of every update of a trial (see `Ledger`)."""
    rows, acks = list(applied_rows(record)), list(acked_rows(record))
    cuts = truncations(record)
    surviving = survivors(rows, cuts)
    durable = [ack for ack in acks if ack.outcome in ("applied", "duplicate")]
    replays = record.of(Replayed)
    final = final_versions(record, surviving)
    lost = lost_updates(rows, surviving, durable, cuts)
    faults = [fault.began for fault in fault_times(record)]
    unrecorded = _unrecorded(final, surviving)
    kept = {(row.shard, row.id) for row in surviving}
    known = {(ack.shard, ack.id) for ack in acks if ack.outcome != "buffered"}
    acked = {(ack.shard, ack.id) for ack in durable}
    # Acked updates that nobody reported and that are not lost are in versions not reported either.
    room = unrecorded - Counter(shard for shard, _ in acked - kept - lost.keys())
    lost |= lost_buffered(acks, rows, cuts, replays, kept | known, room)
    return Ledger(
        attempted=len({(r.shard, r.id) for r in rows} | {(a.shard, a.id) for a in acks}),
        acked=len(acked),
        applied=sum(final.values()),
        lost=len(lost),
        buffered=len({(ack.shard, ack.id) for ack in acks if ack.outcome == "buffered"}),
        replayed=sum(replay.count for replay in replays),
        dropped=sum(replay.dropped for replay in replays)
        + sum(ack.outcome == "dropped" for ack in acks),
        duplicates=sum(ack.outcome == "duplicate" for ack in acks)
        + sum(replay.duplicates for replay in replays),
        applied_twice=len(repeated_applications(surviving)),
        replica_conflicts=len(replica_conflicts(surviving)),
        audit_mismatches=len(audit_mismatches(record, surviving, acks)),
        lost_per_fault=max(lost_by_fault(lost.values(), faults), default=None),
        unrecorded=unrecorded.total(),
    )


# -- columns to rows ---------------------------------------------------------------------------


def applied_rows(record: Record) -> Iterator[Row]:
    """Yield every recorded application, of heads and of other replicas."""
    for batch in record.of(Applied):
        columns = zip(
            batch.times,
            batch.versions,
            batch.workers,
            batch.incarnations,
            batch.seqs,
            batch.replayed,
            batch.staleness,
            batch.staleness_seconds,
            strict=True,
        )
        for t, version, worker, incarnation, seq, replayed, staleness, seconds in columns:
            yield Row(
                t=t,
                shard=batch.shard,
                epoch=batch.epoch,
                version=version,
                id=UpdateId(worker, incarnation, seq),
                head=batch.head,
                replayed=replayed,
                staleness=staleness,
                staleness_seconds=seconds,
            )


def acked_rows(record: Record) -> Iterator[Ack]:
    """Yield every acknowledgement that a worker received."""
    for batch in record.of(Acked):
        columns = zip(
            batch.times, batch.shards, batch.versions, batch.seqs, batch.outcomes, strict=True
        )
        for t, shard, version, seq, outcome in columns:
            identity = UpdateId(batch.worker, batch.incarnation, seq)
            yield Ack(t, shard, version, identity, outcome)


def truncations(record: Record) -> list[Truncation]:
    """Return where each shard's history was cut back, the start of the run included."""
    events: list[Restored | Promoted] = [*record.of(Restored), *record.of(Promoted)]
    return [Truncation(event.t, event.shard, event.epoch, event.version) for event in events]


# -- the surviving lineage ---------------------------------------------------------------------


def survivors(rows: Iterable[Row], cuts: Iterable[Truncation]) -> list[Row]:
    """Return the applications that are part of the final state, by shard, epoch and version.

    An application survives when every later epoch of its shard went on from its version or a
    later one.
    """
    by_shard: defaultdict[int, list[Truncation]] = defaultdict(list)
    for cut in cuts:
        by_shard[cut.shard].append(cut)
    kept = [
        row
        for row in rows
        if all(cut.epoch <= row.epoch or row.version <= cut.version for cut in by_shard[row.shard])
    ]
    return sorted(kept, key=lambda row: (row.shard, row.epoch, row.version))


def lost_updates(
    rows: Iterable[Row],
    surviving: Iterable[Row],
    durable: Iterable[Ack],
    cuts: Iterable[Truncation],
) -> dict[tuple[int, UpdateId], float]:
    """Return the acked updates that a later truncation removed and nothing brought back.

    Each comes with the moment of the truncation that removed it first.

    An acked update without a recorded application is judged by the version in its ack: the node
    that applied it may have been killed before it reported.
    """
    kept = {(row.shard, row.id) for row in surviving}
    versions = {(row.shard, row.id): row.version for row in rows}
    in_order = sorted(cuts, key=lambda cut: cut.t)
    lost: dict[tuple[int, UpdateId], float] = {}
    for ack in durable:
        if (ack.shard, ack.id) not in kept:
            version = _version_of(ack, versions)
            removed = [c.t for c in in_order if c.removes(ack.shard, version) and c.t > ack.t]
            if removed:
                lost.setdefault((ack.shard, ack.id), removed[0])
    return lost


def lost_by_fault(losses: Iterable[float], faults: Sequence[float]) -> list[int]:
    """Count the losses of each fault: a loss belongs to the last fault that began before it.

    Both are moments; faults in order of time. Losses before the first fault belong to none.
    """
    counts = [0] * len(faults)
    for t in losses:
        number = bisect_right(faults, t)
        if number:
            counts[number - 1] += 1
    return counts


def _version_of(ack: Ack, versions: Mapping[tuple[int, UpdateId], int]) -> int:
    # The answer to a duplicate names the version that the shard was at, not that of the update.
    if ack.outcome == "duplicate":
        return versions.get((ack.shard, ack.id), ack.version)
    return ack.version


def repeated_applications(surviving: Iterable[Row]) -> list[tuple[int, UpdateId, int]]:
    """Return shard, update and version of each application after the first of the same update."""
    versions: defaultdict[tuple[int, UpdateId], set[int]] = defaultdict(set)
    for row in surviving:
        versions[row.shard, row.id].add(row.version)
    return [
        (shard, update, version)
        for (shard, update), at in versions.items()
        for version in sorted(at)[1:]
    ]


def replica_conflicts(surviving: Iterable[Row]) -> list[tuple[int, int]]:
    """Return shard and version where replicas of one shard applied different updates."""
    updates: defaultdict[tuple[int, int], set[UpdateId]] = defaultdict(set)
    for row in surviving:
        updates[row.shard, row.version].add(row.id)
    return [place for place, ids in updates.items() if len(ids) > 1]


# -- the final state ---------------------------------------------------------------------------


def final_versions(record: Record, surviving: Iterable[Row]) -> dict[int, int]:
    """Return each shard's last version: as audited, else as far as the surviving lineage goes."""
    final: dict[int, int] = {}
    for row in surviving:
        final[row.shard] = max(final.get(row.shard, 0), row.version)
    for audit in sorted(record.of(Audited), key=lambda audit: audit.epoch):
        final[audit.shard] = audit.version
    return final


def _unrecorded(final: Mapping[int, int], surviving: Iterable[Row]) -> Counter[int]:
    """Count, by shard, the versions of the final state whose application is not in the record."""
    seen = {(row.shard, row.version) for row in surviving}
    counts = Counter(final)
    counts.subtract(shard for shard, _ in seen)
    return counts


def audit_mismatches(
    record: Record, surviving: Iterable[Row], acks: Iterable[Ack]
) -> list[Audited]:
    """Return the audited final states that contradict the events.

    The number of updates must equal the version; no worker may have more updates in the state
    than it is known to have sent, nor fewer than the surviving lineage shows.
    """
    lineage: defaultdict[int, set[UpdateId]] = defaultdict(set)
    for row in surviving:
        lineage[row.shard].add(row.id)
    sent = {shard: set(ids) for shard, ids in lineage.items()}
    for ack in acks:
        sent.setdefault(ack.shard, set()).add(ack.id)
    return [
        audit
        for audit in record.of(Audited)
        if audit.version != sum(audit.applied.values())
        or not _between(lineage[audit.shard], audit.applied, sent.get(audit.shard, set()))
    ]


def _between(least: set[UpdateId], counts: Mapping[str, int], most: set[UpdateId]) -> bool:
    low, high = (Counter(update.worker for update in updates) for updates in (least, most))
    return all(low[w] <= counts.get(w, 0) <= high[w] for w in low.keys() | counts.keys())
