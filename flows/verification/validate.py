"""`dps validate`: the same experiment on real nodes and on virtual time, and how far these differ.

Both are grids of the same trials with the same seeds. For each figure there is the mean of either
over the seeds that both have it for, their difference with its interval, and at the end whether the
figures are as near as is wanted and whether the two experiments read the same, figure by figure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table
from rich.text import Text

from dps.errors import ConfigurationError
from dps.protocol.executor import available_cores
from flows.analysis.comparison import Compared, compared, rows_by, values_of
from flows.analysis.groups import conditions, strategies
from flows.analysis.statistics import FEWEST_SEEDS, Difference, Interval, are_apart, paired
from flows.analysis.statistics.claims import JudgedClaim, judge
from flows.config.trials import load_trials
from flows.metrics import BY_KEY, Metric
from flows.metrics.score import ACCURACY, Score
from flows.report.claims import title, verdict_sentence

if TYPE_CHECKING:
    import numpy as np

    from flows.analysis.outcome import Outcome
    from flows.config.experiment import ExperimentConfig
    from flows.config.trials import Trial
    from flows.config.yaml_document import Document

# Of times, and of what follows from them, the error is a share; the target is for times alone, so
# that none counts twice.
Kind = Literal["time", "derived", "count", "other"]
FIGURES: dict[str, Kind] = {
    "training_seconds": "time",
    "gradients_per_second": "derived",
    "detect_seconds": "time",
    "restore_seconds": "time",
    "first_applied_seconds": "time",
    "rto_seconds": "derived",
    "staleness_median": "other",
    "staleness_p99": "other",
    "updates_lost": "count",
    "updates_replayed": "count",
    "accuracy_final": "other",
    "cost_usd": "derived",
}
# A plan says when a node takes a lost one's place: to wait for it is no figure of either side.
WITH_WAIT = ("restore_seconds", "rto_seconds")
WAIT = "wait_capacity_seconds"
MOST_ERROR = 0.10  # of the median of the errors of times


@dataclass(frozen=True, slots=True)
class Pair:
    """One figure of one strategy under one condition, on real nodes and on virtual time.

    All of it is over the seeds that have the figure on both sides.

    Attributes
    ----------
    real, virtual
        Means.
    lowest, highest
        Of the seeds on real nodes.
    difference
        Virtual minus real, seed by seed.
    """

    metric: str
    condition: str
    strategy: str
    real: float
    virtual: float
    lowest: float
    highest: float
    difference: Difference

    @property
    def error(self) -> float | None:
        """What virtual time says too much, as a share; None where the figure is 0 in reality."""
        return (self.virtual - self.real) / abs(self.real) if self.real else None

    @property
    def within_spread(self) -> bool:
        """Whether the means differ by no more than the seeds on real nodes do."""
        return abs(self.virtual - self.real) <= self.highest - self.lowest

    @property
    def has_enough_seeds(self) -> bool:
        """Whether anything can be told from them."""
        return self.difference.n >= FEWEST_SEEDS


# How two readings of one difference stand to each other.
Relation = Literal["same", "resolution", "direction", "contradiction", "one side only"]
RELATIONS: dict[Relation, str] = {
    "resolution": "differ only in what could be resolved: the two effects have the same direction, "
    "and are no further apart than their intervals allow",
    "direction": "are undecided: the two effects point in opposite directions, but are no further "
    "apart than their intervals allow",
    "contradiction": "contradict each other: the two effects are further apart than their "
    "intervals allow",
    "one side only": "cannot be compared, as one side has no figure for them in all seeds",
}


@dataclass(frozen=True, slots=True)
class ReadTwice:
    """What a strategy does to a figure, as both experiments say it.

    Attributes
    ----------
    about
        The figure, the strategy and the condition.
    real, virtual
        None where that side has no reading.
    """

    about: str
    real: Compared | None
    virtual: Compared | None

    @property
    def relation(self) -> Relation:
        """How the two stand to each other.

        A reading says what the seeds of one side could resolve, so that two can differ where the
        effects do not: "resolution" and "direction", by whether these have the same sign.
        """
        real, virtual = self.real, self.virtual
        if real is None or virtual is None:
            return "one side only"
        if real.reading == virtual.reading:
            return "same"
        one, other = real.difference, virtual.difference
        if one is None or other is None:
            return "one side only"
        if are_apart(_ends(one), _ends(other)):
            return "contradiction"
        return "direction" if one.mean * other.mean < 0 else "resolution"

    @property
    def can_be_told(self) -> bool:
        """Whether no side's reading is that of too few seeds."""
        differences = [side.difference for side in (self.real, self.virtual) if side is not None]
        return all(found is None or found.n >= FEWEST_SEEDS for found in differences)


def _ends(found: Difference) -> Interval:
    """The effect with its interval; one that is the same for all seeds has no spread, if few."""
    low, high = (found.mean, found.mean) if found.constant else (found.low, found.high)
    return Interval(found.mean, low, high, found.n)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How two experiments agree.

    Attributes
    ----------
    pairs
        Figure by figure.
    uneven
        Of figures that not the same seeds have on both sides, which they are, and how many.
    claims
        Each claim of the experiment, as judged on real nodes and on virtual time.
    readings
        What either has to say of each comparison besides.
    left_out
        How many trials are not valid, on real nodes and on virtual time.
    score
        What models are scored by.
    """

    pairs: tuple[Pair, ...]
    uneven: tuple[str, ...]
    claims: tuple[tuple[JudgedClaim, JudgedClaim], ...]
    readings: tuple[ReadTwice, ...]
    left_out: tuple[int, int]
    score: Score = ACCURACY

    @property
    def errors_of_times(self) -> list[float]:
        """The errors of all times, without their signs."""
        found = (pair.error for pair in self.pairs if FIGURES[pair.metric] == "time")
        return [abs(error) for error in found if error is not None]


def twin(
    document: Document, settings: Sequence[str], profile: str
) -> tuple[ExperimentConfig, tuple[Trial, ...]]:
    """Return the same experiment on virtual time, under a name of its own.

    Raises
    ------
    ConfigurationError
        It is on virtual time already, or cannot be, or varies what its nodes are.
    """
    experiment, trials = load_trials(document, settings)
    for axis in experiment.axes:
        if axis.partition(".")[0] == "cluster":
            raise ConfigurationError(
                f"axes: '{axis}' varies the nodes, which dps validate sets for one of its two "
                "sides; expected one kind of nodes for all trials, as by --set"
            )
    if any(trial.config.cluster.kind == "virtual" for trial in trials):
        raise ConfigurationError(
            f"{experiment.experiment} is on virtual time already; validate one that runs on real "
            "nodes"
        )
    name = f"{experiment.experiment}-virtual"
    changes: dict[str, Any] = {
        "experiment": name,
        "cluster": {"kind": "virtual", "profile": profile},
    }
    if not experiment.axes and experiment.comparison.baseline is not None:
        changes["comparison.baseline"] = name  # without axes an experiment is its only strategy
    written = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    return load_trials(document, [*settings, *written])


def agreement(
    real: Sequence[Outcome],
    virtual: Sequence[Outcome],
    experiment: ExperimentConfig,
    rng: np.random.Generator,
) -> Agreement:
    """Compare the outcomes of two experiments; those that are not valid are left out."""
    # Without axes the strategy is the experiment's name, which only the twin's differs in.
    virtual = [
        replace(one, identity=replace(one.identity, experiment=experiment.experiment))
        for one in virtual
    ]
    score = next((each.score for each in (*real, *virtual)), ACCURACY)
    pairs: list[Pair] = []
    uneven: list[str] = []
    for name, metric, mine, theirs in _by_figure(real, virtual):
        if mine.keys() & theirs.keys():
            pairs.append(_pair(*name, metric, mine, theirs, rng))
        if mine.keys() != theirs.keys():
            counts = f"{len(mine)} seeds on real nodes, {len(theirs)} on virtual time"
            uneven.append(f"{_about(score.of(BY_KEY[metric]), *name)} ({counts})")
    left_out = (sum(not one.valid for one in real), sum(not one.valid for one in virtual))
    judged = (judge(side, experiment.claims, rng) for side in (real, virtual))
    return Agreement(
        tuple(pairs),
        tuple(uneven),
        tuple(zip(*judged, strict=True)),
        _readings(real, virtual, experiment, rng, score),
        left_out,
        score,
    )


def table(found: Agreement) -> Table:
    """Return a line for each figure of each strategy under each condition."""
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("figure", "strategy", "condition"):
        shown.add_column(heading)
    for heading in ("real", "virtual", "virtual - real", "error"):
        shown.add_column(heading, justify="right")
    for pair in sorted(found.pairs, key=lambda pair: list(FIGURES).index(pair.metric)):
        column = found.score.of(BY_KEY[pair.metric])
        name = column.label
        if column.shown_unit:
            name += f", {column.shown_unit}"
        if pair.metric in WITH_WAIT:
            name += ", without waiting for a node"
        cells = (
            *(name, pair.strategy, pair.condition),
            *(column.text(pair.real), column.text(pair.virtual)),
            *(_with_interval(pair.difference, column), _error(pair)),
        )
        shown.add_row(*map(Text, cells))
    return shown


def verdict(found: Agreement) -> list[str]:
    """Say whether the two agree as well as is wanted, and what that leaves out."""
    if not found.pairs:
        lines = ["There is no seed whose trial is valid on both sides, so nothing is compared."]
    else:
        lines = [*_of_times(found), *_of_counts(found), *_of_claims(found), *of_readings(found)]
    lines += [f"Not for the same seeds on both sides: {name}" for name in found.uneven]
    if any(found.left_out):
        real, virtual = found.left_out
        lines.append(
            f"Left out, as they are not valid: {real} trials on real nodes, {virtual} on virtual "
            "time"
        )
    return lines


def crowded(trials: Sequence[Trial]) -> list[str]:
    """Say it where real nodes take the cores from each other, which no profile models."""
    nodes = max(
        (len(each.config.node_names) for each in trials if each.config.cluster.kind == "local"),
        default=0,
    )
    cores = available_cores()
    if nodes + 1 <= cores:
        return []
    return [
        f"This machine has {cores} cores for {nodes + 1} processes, which take them from each "
        "other; virtual nodes have one each. That is part of every error above."
    ]


# -- figures -----------------------------------------------------------------------------------


def _by_figure(
    real: Sequence[Outcome], virtual: Sequence[Outcome]
) -> Iterator[tuple[tuple[str, str], str, dict[int, float], dict[int, float]]]:
    """Each figure that a side has: condition and strategy, metric, values by seed on both.

    Seeds that are not valid on both sides are left out.
    """
    rows = [
        rows_by(each, lambda one: (one.identity.condition, one.identity.strategy))
        for each in (real, virtual)
    ]
    for condition in conditions(real):
        for strategy in strategies(real):
            mine, theirs = (each.get((condition, strategy), {}) for each in rows)
            seeds = mine.keys() & theirs.keys()
            sides = [{seed: _without_wait(each[seed]) for seed in seeds} for each in (mine, theirs)]
            for metric in FIGURES:
                values, others = (values_of(each, metric) for each in sides)
                if values or others:
                    yield (condition, strategy), metric, values, others


def _without_wait(row: Mapping[str, Any]) -> Mapping[str, Any]:
    wait = row.get(WAIT) or 0.0
    less = {key: row[key] - wait for key in WITH_WAIT if row.get(key) is not None}
    return {**row, **less}


def _pair(
    condition: str,
    strategy: str,
    metric: str,
    real: Mapping[int, float],
    virtual: Mapping[int, float],
    rng: np.random.Generator,
) -> Pair:
    seeds = real.keys() & virtual.keys()
    seen = [real[seed] for seed in seeds]
    difference = paired(virtual, real, rng)
    assert difference is not None, "they share a seed"
    return Pair(
        *(metric, condition, strategy),
        *(fmean(seen), fmean(virtual[seed] for seed in seeds)),
        *(min(seen), max(seen)),
        difference,
    )


def _with_interval(found: Difference, column: Metric) -> str:
    sign = "+" if found.mean > 0 else ""
    if found.low is None or found.high is None or found.n < FEWEST_SEEDS:
        return f"{sign}{column.text(found.mean)}"
    return f"{sign}{column.text(found.mean)} [{column.text(found.low)}, {column.text(found.high)}]"


def _error(pair: Pair) -> str:
    if FIGURES[pair.metric] not in ("time", "derived") or pair.error is None:
        return ""
    return f"{pair.error:+.0%}"


# -- what they come to -------------------------------------------------------------------------


def _readings(
    real: Sequence[Outcome],
    virtual: Sequence[Outcome],
    experiment: ExperimentConfig,
    rng: np.random.Generator,
    score: Score,
) -> tuple[ReadTwice, ...]:
    judged = (compared(each, experiment.comparison, rng) for each in (real, virtual))
    first, second = (
        {
            _about(score.of(BY_KEY[row.metric]), row.condition, row.strategy): row
            for row in rows
            if row.reading
        }
        for rows in judged
    )
    names = {**first, **second}
    return tuple(ReadTwice(name, first.get(name), second.get(name)) for name in names)


def _of_times(found: Agreement) -> Iterator[str]:
    if errors := found.errors_of_times:
        middle = median(errors)
        yield (
            f"Times: median error {middle:.1%} over {len(errors)} figures, the largest "
            f"{max(errors):.0%} (wanted: {MOST_ERROR:.0%} in the median: "
            f"{_met(middle <= MOST_ERROR)})"
        )


def _of_counts(found: Agreement) -> Iterator[str]:
    counts = [pair for pair in found.pairs if FIGURES[pair.metric] == "count"]
    judged = [pair for pair in counts if pair.has_enough_seeds]
    if judged:
        within = sum(pair.within_spread for pair in judged)
        yield (
            f"Lost and replayed: {within} of {len(judged)} means differ by no more than the seeds "
            f"on real nodes do (wanted: all: {_met(within == len(judged))})"
        )
    for pair in judged:
        if not pair.within_spread:
            column = BY_KEY[pair.metric]
            yield (
                f"  {_about(column, pair.condition, pair.strategy)}: "
                f"{column.text(pair.real)} on real nodes, from {column.text(pair.lowest)} to "
                f"{column.text(pair.highest)}; {column.text(pair.virtual)} on virtual time"
            )
    yield from _untold("Lost and replayed", len(counts) - len(judged))


def _of_claims(found: Agreement) -> Iterator[str]:
    if not found.claims:
        return
    same = sum(one.decision.verdict == other.decision.verdict for one, other in found.claims)
    met = _met(same == len(found.claims))
    yield f"Verdicts on claims: {same} of {len(found.claims)} are the same (wanted: all: {met})"
    for one, other in found.claims:
        if one.decision.verdict != other.decision.verdict:
            yield f"  {title(one.claim, one.score)}"
            yield f"    real nodes: {verdict_sentence(one)}"
            yield f"    virtual time: {verdict_sentence(other)}"


def of_readings(found: Agreement) -> Iterator[str]:
    """Say how many comparisons read the same, and how the others stand to each other."""
    told = [each for each in found.readings if each.can_be_told]
    same = sum(each.relation == "same" for each in told)
    if told:
        met = _met(same == len(told))
        yield f"Readings: {same} of {len(told)} are the same (wanted: all: {met})"
    for relation, meaning in RELATIONS.items():
        if those := [each for each in told if each.relation == relation]:
            yield f"  {len(those)} {meaning}"
            for each in those:
                real, virtual = (_said(side, found.score) for side in (each.real, each.virtual))
                yield f"    {each.about}: {real} on real nodes, {virtual} on virtual time"
    yield from _untold("Readings", len(found.readings) - len(told))


def _said(side: Compared | None, score: Score) -> str:
    if side is None:
        return "no reading"
    found = side.difference
    if found is None:
        return side.said
    return f"{side.said} ({_with_interval(found, score.of(BY_KEY[side.metric]))})"


def _untold(what: str, count: int) -> Iterator[str]:
    if count:
        yield f"{what}: {count} cannot be told from fewer than {FEWEST_SEEDS} seeds"


def _met(met: bool) -> str:
    return "met" if met else "missed"


def _about(column: Metric, condition: str, strategy: str) -> str:
    return f"{column.label}, {strategy}, {condition}".rstrip(", ")
