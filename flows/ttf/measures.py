"""Owns the quantities that the paper's claims are about, measured on one trial from its record.

They are the same for the emulation of the published system and for the real dps, so that a claim is
judged on both by one yardstick.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from dps.events import Killed
from flows.learning import evaluations
from flows.lineage import applied_rows
from flows.outcome import Outcome
from flows.record import Record
from flows.timeline import fault_times, training_span

LAST_BEFORE = 3


@dataclass(frozen=True, slots=True)
class Change:
    """Accuracy across one kill, as the paper's curves show it.

    `before` is the mean of the last 3 evaluations before the kill, `after` the first one after the
    shard served again, `gap` the seconds between the last one before and that one.
    """

    before: float
    after: float
    gap: float

    @property
    def points(self) -> float:
        """`after` minus `before`, as a share of 1."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Measured:
    """One valid trial in the quantities of the claims.

    Attributes
    ----------
    label, strategy
        The configuration as it was run, and the strategy that it counts for.
    kills
        How many times a node was killed.
    changes
        Accuracy across each kill.
    pushed, seconds
        Gradients that workers delivered, and for how long they trained.
    applied, lost
        Gradients in the final weights, and acked ones that a recovery left out.
    final
        Mean of the last 3 evaluations.
    to_target
        Seconds until an evaluation reached the target accuracy of the configuration; the whole time
        if none did, and then `reached` is False.
    idle
        Share of the workers' time in which they did not compute.
    fixed_usd
        Price of all nodes for the whole time, whether they were up or not: `Cost.fixed`.
    """

    label: str
    strategy: str
    condition: str
    workers: int
    kills: int
    seed: int
    changes: tuple[Change, ...]
    pushed: int
    seconds: float
    applied: int
    lost: int
    final: float
    to_target: float
    reached: bool
    idle: float | None
    fixed_usd: float

    @property
    def pace(self) -> float:
        """Gradients delivered per second."""
        return self.pushed / self.seconds


def measure(record: Record, outcome: Outcome) -> Measured | None:
    """Return the quantities of a trial; None for one that is not valid or was never evaluated."""
    seconds, label = outcome.training_seconds, outcome.identity.strategy
    if not outcome.valid or not seconds or outcome.accuracy.final is None:
        return None
    reached = outcome.target.seconds
    return Measured(
        label=label,
        strategy=strategy_of(label),
        condition=outcome.identity.condition,
        workers=record.config.get("training", {}).get("workers", 1),
        kills=len(record.of(Killed)),
        seed=outcome.identity.seed or 0,
        changes=changes(record),
        pushed=outcome.pace.pushed,
        seconds=seconds,
        applied=outcome.ledger.applied,
        lost=outcome.ledger.lost,
        final=outcome.accuracy.final,
        to_target=seconds if reached is None else reached,
        reached=reached is not None,
        idle=outcome.pace.idle_share,
        fixed_usd=outcome.cost.fixed,
    )


def strategy_of(label: str) -> str:
    """Return the strategy that a configuration counts for: "checkpoint" for "sync checkpoint"."""
    return label.removeprefix("sync ").removeprefix("async ")


def changes(record: Record) -> tuple[Change, ...]:
    """Return accuracy across each kill after which training went on and was evaluated again."""
    scores, found = evaluations(record), []
    for fault in fault_times(record):
        before = [s for s in scores if s.t < fault.began]
        after = [s for s in scores if fault.serving is not None and s.t >= fault.serving]
        if before and after:
            mean = fmean(s.accuracy for s in before[-LAST_BEFORE:])
            found.append(Change(mean, after[0].accuracy, after[0].t - before[-1].t))
    return tuple(found)


def delivered(record: Record) -> tuple[list[float], list[int]]:
    """Return when gradients were applied, and how many had been by then."""
    start = (training_span(record) or (0.0, 0.0))[0]
    times = sorted(row.t - start for row in applied_rows(record) if row.head)
    return times, list(range(1, len(times) + 1))


def by_seed(trials: Iterable[Measured], value: Callable[[Measured], float]) -> dict[int, float]:
    """Return the mean of a quantity for each seed, over whatever else the trials differ in."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for trial in trials:
        found[trial.seed].append(value(trial))
    return {seed: fmean(values) for seed, values in found.items()}


def ratios(values: Mapping[int, float], base: Mapping[int, float]) -> dict[int, float]:
    """Return value over baseline, minus 1, for each seed that both have."""
    shared = values.keys() & base.keys()
    return {seed: values[seed] / base[seed] - 1 for seed in sorted(shared) if base[seed]}
