"""`dps validate`: the same experiment on real nodes and on virtual time, and how far these differ.

Both are grids of the same trials with the same seeds. For each figure there is the mean of either,
their difference with its interval, and at the end whether the figures are as near as is wanted and
whether the two experiments come to the same verdicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

from dps.errors import ConfigurationError
from dps.protocol.executor import available_cores
from flows.analysis.comparison import Compared, compared, rows_by, values_of
from flows.analysis.groups import conditions, strategies
from flows.analysis.statistics import FEWEST_SEEDS, Difference, interval, paired
from flows.config.trials import load_trials
from flows.metrics import BY_KEY, NOT_APPLICABLE

if TYPE_CHECKING:
    import numpy as np

    from flows.analysis.outcome import Outcome
    from flows.config.experiment import ExperimentConfig
    from flows.config.trials import Trial
    from flows.config.yaml_document import Document

Kind = Literal["time", "count", "other"]

# What is looked at, and how: of times and rates the error is a share, of others a difference.
FIGURES: dict[str, Kind] = {
    "training_seconds": "time",
    "gradients_per_second": "time",
    "detect_seconds": "time",
    "restore_seconds": "time",
    "first_applied_seconds": "time",
    "rto_seconds": "time",
    "staleness_median": "other",
    "staleness_p99": "other",
    "updates_lost": "count",
    "updates_replayed": "count",
    "accuracy_final": "other",
    "cost_usd": "time",
}
MOST_ERROR = 0.10  # of the median of the errors of times


@dataclass(frozen=True, slots=True)
class Pair:
    """One figure of one strategy under one condition, on real nodes and on virtual time.

    Attributes
    ----------
    real, virtual
        Means over the seeds that have the figure.
    lowest, highest
        Of the seeds on real nodes.
    difference
        Virtual minus real, seed by seed; None where no seed has both.
    """

    metric: str
    condition: str
    strategy: str
    real: float
    virtual: float
    lowest: float
    highest: float
    difference: Difference | None

    @property
    def error(self) -> float | None:
        """What virtual time says too much, as a share; None where the figure is 0 in reality."""
        return (self.virtual - self.real) / abs(self.real) if self.real else None

    @property
    def within_spread(self) -> bool:
        """Whether the means differ by no more than the seeds on real nodes do."""
        return abs(self.virtual - self.real) <= self.highest - self.lowest


@dataclass(frozen=True, slots=True)
class Agreement:
    """How two experiments agree: figure by figure, and in how many of their `verdicts`.

    `one_sided` names figures that one of the two alone has.
    """

    pairs: tuple[Pair, ...]
    one_sided: tuple[str, ...]
    verdicts: tuple[tuple[Compared, Compared], ...]

    @property
    def errors_of_times(self) -> list[float]:
        """The errors of all times and rates, without their signs."""
        found = (pair.error for pair in self.pairs if FIGURES[pair.metric] == "time")
        return [abs(error) for error in found if error is not None]


def twin(
    document: Document, settings: Sequence[str], profile: str
) -> tuple[ExperimentConfig, tuple[Trial, ...]]:
    """Return the same experiment on virtual time, under a name of its own.

    Raises
    ------
    ConfigurationError
        It is on virtual time already, or cannot be.
    """
    experiment, trials = load_trials(document, settings)
    if any(trial.config.cluster.kind == "virtual" for trial in trials):
        raise ConfigurationError(
            f"{experiment.experiment} is on virtual time already; validate one that runs on real "
            "nodes"
        )
    name = f"{experiment.experiment}-virtual"
    changes = (f"experiment={name}", f"cluster={{kind: virtual, profile: {profile}}}")
    return load_trials(document, [*settings, *changes])


def agreement(
    real: Sequence[Outcome],
    virtual: Sequence[Outcome],
    experiment: ExperimentConfig,
    rng: np.random.Generator,
) -> Agreement:
    """Compare the outcomes of two experiments; those that are not valid are left out."""
    pairs, one_sided = [], []
    for found in _pairs(real, virtual, rng):
        if isinstance(found, Pair):
            pairs.append(found)
        else:
            one_sided.append(found)
    judged = (compared(each, experiment.comparison, rng) for each in (real, virtual))
    first, second = ({_place(row): row for row in rows if row.verdict} for rows in judged)
    both = tuple((first[place], second[place]) for place in first if place in second)
    return Agreement(tuple(pairs), tuple(one_sided), both)


def table(found: Agreement) -> Table:
    """Return a line for each figure of each strategy under each condition."""
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("figure", "strategy", "condition"):
        shown.add_column(heading)
    for heading in ("real", "virtual", "virtual - real", "error"):
        shown.add_column(heading, justify="right")
    for pair in sorted(found.pairs, key=lambda pair: list(FIGURES).index(pair.metric)):
        column = BY_KEY[pair.metric]
        name = f"{column.label}, {column.shown_unit}" if column.shown_unit else column.label
        cells = (
            *(name, pair.strategy, pair.condition),
            *(column.text(pair.real), column.text(pair.virtual)),
            *(_difference(pair), _error(pair)),
        )
        shown.add_row(*map(Text, cells))
    return shown


def verdict(found: Agreement) -> list[str]:
    """Say whether the two agree as well as is wanted."""
    lines = []
    if errors := found.errors_of_times:
        middle = median(errors)
        said = "met" if middle <= MOST_ERROR else "missed"
        lines.append(
            f"Times, rates and money: median error {middle:.1%} over {len(errors)} figures, the "
            f"largest {max(errors):.0%} (wanted: {MOST_ERROR:.0%} in the median: {said})"
        )
    counts = [pair for pair in found.pairs if FIGURES[pair.metric] == "count"]
    if counts:
        within = sum(pair.within_spread for pair in counts)
        said = "met" if within == len(counts) else "missed"
        lines.append(
            f"Lost and replayed: {within} of {len(counts)} means differ by no more than the seeds "
            f"on real nodes do (wanted: all: {said})"
        )
    if found.verdicts:
        agreed = sum(one.verdict == other.verdict for one, other in found.verdicts)
        said = "met" if agreed == len(found.verdicts) else "missed"
        lines.append(f"Verdicts: {agreed} of {len(found.verdicts)} agree (wanted: all: {said})")
    for one, other in found.verdicts:
        if one.verdict != other.verdict:
            place = f"{BY_KEY[one.metric].label}, {one.strategy}, {one.condition}".rstrip(", ")
            lines.append(f"  {place}: {one.said} on real nodes, {other.said} on virtual time")
    lines += [f"Not compared, as one side alone has it: {name}" for name in found.one_sided]
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


# -- parts -------------------------------------------------------------------------------------


def _pairs(
    real: Sequence[Outcome], virtual: Sequence[Outcome], rng: np.random.Generator
) -> Iterator[Pair | str]:
    """Each figure that both have; of one that one side alone has, what it is."""
    rows = [
        rows_by(each, lambda one: (one.identity.condition, one.identity.strategy))
        for each in (real, virtual)
    ]
    for condition in conditions(real):
        for strategy in strategies(real):
            trials = [each.get((condition, strategy), {}) for each in rows]
            for metric in FIGURES:
                mine, theirs = (values_of(each, metric) for each in trials)
                if mine and theirs:
                    seen = list(mine.values())
                    yield Pair(
                        *(metric, condition, strategy),
                        interval(seen, rng).mean,
                        interval(list(theirs.values()), rng).mean,
                        *(min(seen), max(seen)),
                        paired(theirs, mine, rng),
                    )
                elif mine or theirs:
                    yield f"{BY_KEY[metric].label}, {strategy}, {condition}".rstrip(", ")


def _place(row: Compared) -> tuple[str, str, str]:
    return row.metric, row.condition, row.strategy


def _difference(pair: Pair) -> str:
    found, column = pair.difference, BY_KEY[pair.metric]
    if found is None:
        return NOT_APPLICABLE
    sign = "+" if found.mean > 0 else ""
    if found.low is None or found.high is None or found.n < FEWEST_SEEDS:
        return f"{sign}{column.text(found.mean)}"
    return f"{sign}{column.text(found.mean)} [{column.text(found.low)}, {column.text(found.high)}]"


def _error(pair: Pair) -> str:
    if FIGURES[pair.metric] != "time" or pair.error is None:
        return ""
    return f"{pair.error:+.0%}"
