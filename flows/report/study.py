"""An experiment as its report sees it: its trials as one table, claims, comparison and looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from flows.config.claims import ClaimSection
from flows.config.settings import ComparisonSection
from flows.metrics import BY_KEY, METRICS, NOT_APPLICABLE, Metric
from flows.metrics.faults import training_span
from flows.metrics.outcome import Outcome
from flows.metrics.score import ACCURACY, Score
from flows.records.record import Record
from flows.report.claims import money
from flows.statistics.caveats import time_basis
from flows.statistics.claims import JudgedClaim, judge
from flows.statistics.comparison import Compared, compared
from flows.statistics.groups import conditions, strategies

if TYPE_CHECKING:
    import pandas as pd

Trial = tuple[Record, Outcome]

NUMBERS = tuple(metric.key for metric in METRICS if metric.number)
CONSISTENCY = {
    "asp": "asynchronous (ASP)",
    "bsp": "synchronous (BSP)",
    "ssp": "bounded staleness (SSP)",
}
MAX_VALUES = 4  # of a setting that varies, in the header


def trials_frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """Return one row per trial; columns are the keys of `METRICS`, values plain numbers."""
    import pandas as pd

    frame = pd.DataFrame([outcome.row() for outcome in outcomes], columns=list(BY_KEY))
    return frame.astype(dict.fromkeys([*NUMBERS, "seed"], float)).copy()


@dataclass(frozen=True)
class Study:
    """The trials of one experiment with all that follows from them.

    `outcomes` are all trials, in the order of the configuration; those that are not valid as well.
    Without their `records`, there are only tables.
    """

    outcomes: tuple[Outcome, ...]
    records: tuple[Record, ...] = ()
    claims: tuple[ClaimSection, ...] = ()
    section: ComparisonSection = field(default_factory=ComparisonSection)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per trial; see `trials_frame`."""
        return trials_frame(self.outcomes)

    @cached_property
    def valid(self) -> pd.DataFrame:
        """The rows of valid trials."""
        return self.frame[self.frame["status"] == "valid"]

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """The valid trials with their records."""
        pairs = zip(self.records, self.outcomes, strict=True)
        return tuple((record, outcome) for record, outcome in pairs if outcome.valid)

    @cached_property
    def strategies(self) -> tuple[str, ...]:
        """All strategies, in the order of the configuration."""
        return strategies(self.outcomes)

    @cached_property
    def conditions(self) -> tuple[str, ...]:
        """The conditions with valid trials, in the order of the configuration."""
        return conditions([outcome for outcome in self.outcomes if outcome.valid])

    @cached_property
    def faulty(self) -> tuple[str, ...]:
        """The conditions under which trials met faults."""
        hit = {o.identity.condition for o in self.outcomes if o.valid and o.faults}
        return tuple(condition for condition in self.conditions if condition in hit)

    @cached_property
    def shown(self) -> tuple[str, ...]:
        """The conditions in tables and figures: those with faults, or all if there are none."""
        return self.faulty or self.conditions

    @cached_property
    def lead(self) -> str:
        """The condition that the report opens with: of the first claim, or the first shown."""
        for claim in self.claims[:1]:
            for outcome in self.outcomes:
                own = outcome.identity
                if own.condition in self.shown and claim.side_of(own.strategy, own.labels) == 0:
                    return own.condition
        return next(iter(self.shown), "")

    @property
    def score(self) -> Score:
        """The score of the models."""
        return self.outcomes[0].score if self.outcomes else ACCURACY

    @cached_property
    def compared(self) -> tuple[Compared, ...]:
        """The exploratory comparison with the baseline."""
        import numpy as np

        # Drawn with the same seed, so that the same records always make the same report.
        return compared(self.outcomes, self.section, np.random.default_rng(0))

    @cached_property
    def judged(self) -> tuple[JudgedClaim, ...]:
        """The claims with their verdicts."""
        import numpy as np

        return judge(self.outcomes, self.claims, np.random.default_rng(0))

    def under(self, condition: str, strategy: str | None = None) -> list[Trial]:
        """Return the valid trials under a condition, of one strategy or of all."""
        return [
            trial
            for trial in self.trials
            if trial[1].identity.condition == condition
            and strategy in (None, trial[1].identity.strategy)
        ]

    def controls(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the controls of some trials, each once."""
        names = {outcome.effects.control for _, outcome in trials}
        return [trial for trial in self.trials if trial[1].identity.trial in names]

    # -- how numbers are written ---------------------------------------------------------------

    def metric(self, key: str) -> Metric:
        """Return a metric by the name and in the unit of the score."""
        return self.score.of(BY_KEY[key])

    @cached_property
    def money(self) -> tuple[float, str]:
        """The scale and the unit that money is written with."""
        return money(float(self.valid["cost_usd"].max()) if len(self.valid) else 1.0)

    def unit(self, key: str) -> str:
        """Return the unit that `text` writes values in."""
        return self.money[1] if self.metric(key).unit == "USD" else self.metric(key).shown_unit

    def label(self, key: str) -> str:
        """Return the label of a metric with its unit."""
        label, unit = self.metric(key).label, self.unit(key)
        label = f"updates {label}" if key.startswith("updates_") else label
        return f"{label}, {unit}" if unit else label

    def text(self, key: str, value: Any) -> str:
        """Return a value as readers see it, without its unit."""
        import pandas as pd

        if value is None or pd.isna(value):
            return NOT_APPLICABLE
        if self.metric(key).unit == "USD":
            text = f"{self.money[0] * value:,.{2 if self.money[0] == 1 else 0}f}".replace("-", "−")
            return text if text.strip("−0.") else "0"
        return self.metric(key).format(value)

    # -- the header ----------------------------------------------------------------------------

    @cached_property
    def facts(self) -> list[tuple[str, str]]:
        """The key facts for the header, as names and values."""
        configs = [_config_facts(record.config) for record in self.records]
        settings = {
            name: list(dict.fromkeys(each[name] for each in configs)) for name in configs[0]
        }
        counts = self.frame["status"].value_counts()
        trials = ", ".join(f"{count} {status}" for status, count in counts.items())
        seeds = sorted({int(seed) for seed in self.frame["seed"].dropna()})
        virtual = time_basis([outcome.virtual for outcome in self.outcomes])
        finished = datetime.fromtimestamp(max(r.events[-1].t for r in self.records), UTC)
        few = {k: ", ".join(v) if len(v) <= MAX_VALUES else "varied" for k, v in settings.items()}
        facts = [
            *few.items(),
            ("trials", trials),
            ("seeds", ranges(seeds)),
            ("score", self.score.note),
            # Virtual time begins at the same moment in every trial.
            ("time", virtual or f"real nodes, until {finished:%-d %B %Y, %H:%M UTC}"),
        ]
        return [(name, value) for name, value in facts if value]


def _config_facts(config: Mapping[str, Any]) -> dict[str, str]:
    training, server = config.get("training", {}), config.get("server", {})
    consistency = dict(config.get("consistency", {}))
    kind = str(consistency.pop("kind", ""))
    bounds = [f"{name} {value}" for name, value in consistency.items()]
    updates = training.get("updates")
    return {
        "model": _named(config.get("workload", {})),
        "data": _named(config.get("dataset", {})),
        "gradients": f"{updates:,}" if updates else "",
        "workers": str(training.get("workers", "")),
        "shards": str(server.get("shards", "")),
        "consistency": ", ".join(filter(None, [CONSISTENCY.get(kind, kind), *bounds])),
    }


def _named(section: Mapping[str, Any]) -> str:
    """Return a model or data set as its user names it: a function or file before a kind."""
    own = section.get("function") or section.get("model") or section.get("path")
    if isinstance(own, str):
        return PurePath(own).name
    kind, hidden = str(section.get("kind", "")), section.get("hidden")
    if hidden:
        return f"{kind} ({' × '.join(map(str, hidden))} hidden units)"
    return kind


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers with runs of three and more shortened, as in "0–7, 12"."""
    starts = [0, *(i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1), len(numbers)]
    runs = [numbers[first:last] for first, last in pairwise(starts)]
    return ", ".join(
        f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs if run
    )


def start(record: Record) -> float:
    """Return when the training started, or the record if it never did."""
    span = training_span(record)
    return span[0] if span else record.events[0].t


def end(record: Record) -> float:
    """Return when the training ended, or the record if it never started."""
    span = training_span(record)
    return span[1] if span else record.events[-1].t
