"""How fast a training went: gradients per second, how many of them survived, idle workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dps.events import Reported, TrainingStarted
from flows.analysis.effects.outages import disturbed
from flows.analysis.faults import FaultTimes, training_span
from flows.analysis.ledger import Ledger
from flows.analysis.steps import pushed
from flows.records.record import Record

COMPUTE = "compute_seconds"


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a training went.

    Attributes
    ----------
    seconds
        From the start of the workers until one of them last got an answer.
    pushed
        Different gradients that workers were told are safe or buffered, however many shards each
        touches, and whether or not they were lost or dropped later.
    together
        Pushed gradients per second while all workers were at work: from when the last one had
        pushed its first until one had pushed its last. None where there was no such time.
    steady
        The same without the time from each fault to when nothing was left of it to be seen (see
        `flows.analysis.effects.outages.disturbed`). None where there was no such time.
    goodput
        Gradients per second of training that are in the final state: the mean over the shards.
    idle_share
        The share of the workers' time between their first and last report in which they did not
        compute a gradient: they waited for the server, or for each other. None without reports.
    """

    seconds: float | None
    pushed: int
    together: float | None
    steady: float | None
    goodput: float | None
    idle_share: float | None

    @property
    def gradients_per_second(self) -> float | None:
        """Pushed gradients per second of training."""
        return self.pushed / self.seconds if self.seconds else None


def pace(record: Record, counts: Ledger, faults: Sequence[FaultTimes]) -> Pace:
    """Return how fast the training of a record went; `counts` is its ledger, `faults` its own."""
    span = training_span(record)
    seconds = span[1] - span[0] if span else None
    started = record.of(TrainingStarted)
    surviving = counts.applied / started[0].shards if started else 0.0
    gradients = pushed(record)
    return Pace(
        seconds=seconds,
        pushed=len(gradients),
        together=_rate(gradients, []),
        steady=_rate(gradients, disturbed(record, faults)),
        goodput=surviving / seconds if seconds else None,
        idle_share=_idle_share(record),
    )


def _rate(
    gradients: Mapping[tuple[str, int, int], float], without: Sequence[tuple[float, float]]
) -> float | None:
    """Gradients a second while all workers were at work, `without` some spans of that time."""
    by_worker: defaultdict[str, list[float]] = defaultdict(list)
    for (worker, _, _), t in gradients.items():
        by_worker[worker].append(t)
    began = max((min(times) for times in by_worker.values()), default=0.0)
    ended = min((max(times) for times in by_worker.values()), default=0.0)
    left_out = [(max(began, since), min(ended, until)) for since, until in without]
    left_out = [(since, until) for since, until in left_out if since < until]
    seconds = ended - began - sum(until - since for since, until in left_out)
    if seconds <= 0:
        return None
    counted = (t for t in gradients.values() if began < t <= ended)
    return sum(not any(a < t <= b for a, b in left_out) for t in counted) / seconds


def computing(record: Record) -> Iterator[tuple[float, float, float]]:
    """Yield for every step of a worker but its first: its beginning, its end, seconds computed.

    A step runs from one report to the next, so that the time in which a worker loads its data
    is in none.
    """
    runs: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for event in record.of(Reported):
        if event.name == COMPUTE:
            run = runs[event.worker, event.incarnation]
            run.extend(zip(event.times, event.values, strict=True))
    for steps in runs.values():
        yield from _intervals(steps)


def _intervals(steps: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float, float]]:
    previous: float | None = None
    for t, computed in sorted(steps):
        if previous is not None:
            yield previous, t, computed
        previous = t


def _idle_share(record: Record) -> float | None:
    steps = list(computing(record))
    there = sum(end - began for began, end, _ in steps)
    if there <= 0:
        return None
    computed = sum(seconds for _, _, seconds in steps)
    # The clock of a report is not the one that the computation was timed with.
    return max(0.0, 1 - computed / there)
