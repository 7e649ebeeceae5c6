"""Owns the quantities that the paper's claims are about, measured on one trial from its record.

They are the same for the emulation of the published system and for the real dps, so that a claim is
judged on both by one yardstick.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from flows.learning import evaluations
from flows.lineage import applied_rows
from flows.outcome import Outcome
from flows.published.losses import lost_gradients
from flows.published.settings import is_emulated
from flows.record import Record
from flows.timeline import fault_times, training_span

LAST_BEFORE = 3

# Kills, workers and seed: what trials of two strategies must share to be set beside each other.
Cell = tuple[int, int, int]
Cells = dict[Cell, float]


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
        How many kills its configuration asks for.
    changes
        Accuracy across each kill.
    pushed, seconds
        Gradients that workers delivered, and for how long they trained.
    lost
        Gradients that a failure left out of the final weights: of the real dps such as were acked,
        of the emulation all that a server had been given.
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
    """Return the quantities of a trial; None for one that cannot tell them (see `why_not`)."""
    seconds, label = outcome.training_seconds, outcome.identity.strategy
    if why_not(outcome) or not seconds or outcome.accuracy.final is None:
        return None
    reached = outcome.target.seconds
    return Measured(
        label=label,
        strategy=strategy_of(label),
        condition=outcome.identity.condition,
        workers=record.config.get("training", {}).get("workers", 1),
        kills=planned_kills(record.config),
        seed=outcome.identity.seed or 0,
        changes=changes(record),
        pushed=outcome.pace.pushed,
        seconds=seconds,
        lost=lost_gradients(record) if is_emulated(record.config) else outcome.ledger.lost,
        final=outcome.accuracy.final,
        to_target=seconds if reached is None else reached,
        reached=reached is not None,
        idle=outcome.pace.idle_share,
        fixed_usd=outcome.cost.fixed,
    )


def why_not(outcome: Outcome) -> str:
    """Return why a trial cannot be measured, or nothing.

    The record of a resumed trial begins in the middle: times, gradients and kills before are not in
    it, so that it would count as a faster trial with fewer kills.
    """
    if not outcome.valid:
        return f"{outcome.status}: {outcome.reason}"
    if not outcome.whole:
        return "resumed: its record begins in the middle"
    return (
        "" if outcome.training_seconds and outcome.accuracy.final is not None else "not evaluated"
    )


def planned_kills(config: Mapping[str, Any]) -> int:
    """Return how many kills a trial's configuration asks for, that of the emulation as well."""
    if "kills" in config:
        return int(config["kills"])
    return sum(fault["kind"] == "kill" for fault in config.get("faults", ()))


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


def by_cell(values: Iterable[tuple[Measured, float]]) -> Cells:
    """Return the mean of a quantity for each cell, over the configurations of its strategy."""
    found: defaultdict[Cell, list[float]] = defaultdict(list)
    for trial, value in values:
        found[trial.kills, trial.workers, trial.seed].append(value)
    return {cell: fmean(each) for cell, each in found.items()}


def by_seed(cells: Cells) -> dict[int, float]:
    """Return the mean over the cells of each seed."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for (_, _, seed), value in cells.items():
        found[seed].append(value)
    return {seed: fmean(values) for seed, values in found.items()}
