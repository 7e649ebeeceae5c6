"""The quantities that the paper's claims are about, measured on one trial from its record.

They are the same for the emulation of the published system and for the real dps, so that a claim is
judged on both by one yardstick.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from flows.analysis.faults import fault_times, training_span
from flows.analysis.learning import evaluations
from flows.analysis.ledger import acked_rows, applied_rows, truncations
from flows.analysis.outcome import Outcome
from flows.analysis.statistics.claims import FIXED
from flows.analysis.steps import Steps, pushed_times
from flows.records.record import Record
from flows.replication.ttf.emulation.settings import is_emulated

LAST_BEFORE = 3

# Kills, workers and seed: what trials of two strategies must share to be set beside each other.
Cell = tuple[int, int, int]
Cells = dict[Cell, float]


@dataclass(frozen=True, slots=True)
class Change:
    """Accuracy across one kill, as the paper's curves show it.

    `before` is the mean of the last 3 evaluations before the kill, `after` the first one after the
    shard served again, `gap` the seconds between the last one before and that one. `control` is
    what the same seed gained without a kill over the same seconds; None where there is no such
    trial, and of every kill but the first: only until then are the two the same training.
    """

    before: float
    after: float
    gap: float
    control: float | None = None

    @property
    def points(self) -> float:
        """`after` minus `before`, as a share of 1, as published.

        No effect of the kill: on a curve that rises, it contains what was learnt meanwhile.
        """
        return self.after - self.before

    @property
    def effect(self) -> float | None:
        """`points` minus `control`: the effect of the kill by the time the shard served again."""
        return None if self.control is None else self.points - self.control


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
    ends_down
        Whether a shard that a fault took did not serve again: `final` is then from before.
    peak_bytes
        Most memory that processes had, all of each role together; none on virtual time.
    virtual
        Whether on virtual time.
    fixed
        Digests of the claims that there were when it began, as its record names them.
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
    ends_down: bool = False
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    virtual: bool = False
    fixed: frozenset[str] = frozenset()

    @property
    def pace(self) -> float:
        """Gradients delivered per second."""
        return self.pushed / self.seconds


def measure(record: Record, outcome: Outcome, control: Record | None = None) -> Measured | None:
    """Return the quantities of a trial; None for one that cannot tell them (see `why_not`).

    `control` is the same training without a fault, if there is one (see `twin`).
    """
    seconds, label = outcome.pace.seconds, outcome.identity.strategy
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
        changes=changes(record, control),
        pushed=outcome.pace.pushed,
        seconds=seconds,
        lost=lost_gradients(record) if is_emulated(record.config) else outcome.ledger.lost,
        final=outcome.accuracy.final,
        to_target=seconds if reached is None else reached,
        reached=reached is not None,
        idle=outcome.pace.idle_share,
        fixed_usd=outcome.cost.fixed,
        ends_down=ends_down(outcome),
        peak_bytes={role: used.peak_bytes for role, used in outcome.usage.items()},
        virtual=bool(outcome.virtual),
        fixed=frozenset(
            name.removeprefix(FIXED) for name in outcome.circumstances if name.startswith(FIXED)
        ),
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
    return "" if outcome.pace.seconds and outcome.accuracy.final is not None else "not evaluated"


def ends_down(outcome: Outcome) -> bool:
    """Whether a shard that a fault took did not serve again before the trial was over."""
    return any(fault.shard is not None and fault.serving is None for fault in outcome.faults)


def planned_kills(config: Mapping[str, Any]) -> int:
    """Return how many kills a trial's configuration asks for, that of the emulation as well."""
    if "kills" in config:
        return int(config["kills"])
    return sum(fault["kind"] == "kill" for fault in config.get("faults", ()))


def twin(record: Record, outcome: Outcome) -> tuple[str, int, int]:
    """Return what a trial and its control share: configuration, workers and seed."""
    workers = record.config.get("training", {}).get("workers", 1)
    return outcome.identity.strategy, workers, outcome.identity.seed or 0


def is_control(record: Record, outcome: Outcome) -> bool:
    """Whether a trial can tell what others would have been without their faults."""
    return not (why_not(outcome) or planned_kills(record.config) or record.config.get("faults"))


def strategy_of(label: str) -> str:
    """Return the strategy that a configuration counts for: "checkpoint" for "sync checkpoint"."""
    return label.removeprefix("sync ").removeprefix("async ")


def changes(record: Record, control: Record | None = None) -> tuple[Change, ...]:
    """Return accuracy across each kill after which training went on and was evaluated again."""
    scores, found = evaluations(record), []
    faults = fault_times(record)
    for fault in faults:
        before = [s for s in scores if s.t < fault.began][-LAST_BEFORE:]
        after = [s for s in scores if fault.serving is not None and s.t >= fault.serving]
        if not (before and after):
            continue
        gained = None
        if control is not None and fault.fault == faults[0].fault:
            steps = Steps(record)
            earlier = [steps.at(s.t) for s in before]
            gained = _gained(control, earlier, steps.at(fault.began), after[0].t - fault.began)
        mean = fmean(s.accuracy for s in before)
        found.append(Change(mean, after[0].accuracy, after[0].t - before[-1].t, gained))
    return tuple(found)


def _gained(control: Record, before: Sequence[int], killed: int, seconds: float) -> float | None:
    """What a training without a fault gained where another one was hit by a kill.

    `before` and `killed` are the gradients pushed by the evaluations before the kill and by the
    kill, `seconds` what it then took to the evaluation after it. Up to the kill the two are the
    same training, so the control is met where it had as many gradients, however fast the machine
    was for each; from there on as many seconds count. Its curve is straight between evaluations,
    and level after the last.
    """
    pushed, scores = pushed_times(control), evaluations(control)
    if not scores or len(pushed) < killed:
        return None
    when = [pushed[number - 1] if number else scores[0].t for number in (*before, killed)]
    moments = [*when[:-1], when[-1] + seconds]
    *earlier, later = np.interp(moments, [s.t for s in scores], [s.accuracy for s in scores])
    return float(later - fmean(earlier))


def lost_gradients(record: Record) -> int:
    """Return how many gradients a server of the emulation was given that the end does not have.

    Only a server of checkpoint or chain tells the worker that a gradient is applied; the stateless
    one takes gradients out of the store that nobody has again if it is killed before it puts the
    weights back. So what counts is not what was acknowledged. The one worker numbers its gradients,
    and they arrive in that order: whatever came before the last one that a server had is either in
    the weights or lost, and whatever came after it is still in the queue.

    The version of the weights says how many are in them, also of those whose application a killed
    server could not report any more.
    """
    rows = [row for row in applied_rows(record) if row.head]
    given = [row.id.seq for row in rows]
    given += [ack.id.seq for ack in acked_rows(record) if ack.outcome == "applied"]
    starts = truncations(record)
    if not given or not starts:
        return 0
    last = max(starts, key=lambda start: start.epoch)
    held = max([last.version, *(row.version for row in rows if row.epoch == last.epoch)])
    return max(given) + 1 - held


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
