"""How old the weights were that applied gradients came from, and when: around a fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from flows.analysis.faults import FaultTimes
from flows.analysis.ledger import Row
from flows.analysis.statistics import nearest_rank
from flows.metrics.metric import Period

PERIODS: tuple[Period, ...] = ("before", "during", "after")


@dataclass(frozen=True, slots=True)
class Staleness:
    """How old the weights were that applied gradients came from, over applications by heads.

    Percentiles are nearest-rank. `median`, `p99` and `max` count versions, the others time.
    """

    median: int | None
    p99: int | None
    max: int | None
    median_seconds: float | None
    p99_seconds: float | None


def staleness(heads: Sequence[Row]) -> Staleness:
    """Sum up the staleness of these applications."""
    versions = [row.staleness for row in heads]
    seconds = [row.staleness_seconds for row in heads]
    median, p99 = nearest_rank(versions, 0.5), nearest_rank(versions, 0.99)
    return Staleness(
        median=None if median is None else int(median),
        p99=None if p99 is None else int(p99),
        max=max(versions, default=None),
        median_seconds=nearest_rank(seconds, 0.5),
        p99_seconds=nearest_rank(seconds, 0.99),
    )


def by_period(rows: Iterable[Row], faults: Sequence[FaultTimes]) -> dict[Period, list[Row]]:
    """Split applications into those before, during and after the faults of a trial.

    What a fault delays is applied after it is over, so it is not the moment of the application
    that tells: *during* are the applications since a fault whose weights were read before the
    shard served again, replayed ones included. *After* are all others since the first fault.
    Without a fault everything is before.
    """
    outages = [(fault.began, _over(fault)) for fault in faults]
    first = min((began for began, _ in outages), default=inf)
    periods: dict[Period, list[Row]] = {period: [] for period in PERIODS}
    for row in rows:
        read = row.t - row.staleness_seconds
        if row.t < first:
            periods["before"].append(row)
        elif any(began <= row.t and read < over for began, over in outages):
            periods["during"].append(row)
        else:
            periods["after"].append(row)
    return periods


def _over(fault: FaultTimes) -> float:
    """When the shard served again; else when the node was itself again, or at once."""
    if fault.shard is None:
        return fault.began if fault.ended is None else fault.ended
    return inf if fault.serving is None else fault.serving
