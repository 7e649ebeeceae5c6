"""Owns what became of updates that were buffered during an outage and are not known to be applied.

Being told "buffered", a worker takes an update for safe and never sends it again; but the mailbox
that has it can be lost, and a replay policy may leave it out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from dps.core.updates import UpdateId

if TYPE_CHECKING:
    from dps.events import Replayed
    from flows.analysis.ledger import Ack, Row, Truncation

Key = tuple[int, UpdateId]
"""One update on one shard."""


def lost_buffered(
    acks: Iterable[Ack],
    rows: Iterable[Row],
    cuts: Iterable[Truncation],
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
    moments = _by_shard(cuts)
    lost: dict[Key, float] = {}
    for shard, keys in _grouped(since).items():
        left_out = [(r.t, r.dropped) for r in replays if r.shard == shard]
        waiting = _without_dropped(keys, since, left_out)
        for key in waiting[unrecorded.get(shard, 0) :]:
            lost[key] = min((t for t in moments[shard] if t > since[key]), default=inf)
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


def _grouped(keys: Iterable[Key]) -> dict[int, list[Key]]:
    groups: defaultdict[int, list[Key]] = defaultdict(list)
    for key in keys:
        groups[key[0]].append(key)
    return groups


def _by_shard(cuts: Iterable[Truncation]) -> defaultdict[int, list[float]]:
    moments: defaultdict[int, list[float]] = defaultdict(list)
    for cut in cuts:
        moments[cut.shard].append(cut.t)
    return moments
