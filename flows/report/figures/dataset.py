"""What is drawn of an experiment: its valid trials by strategy and condition, and looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dps.events import TrialResumed
from flows.analysis.faults import training_span
from flows.analysis.groups import Group, conditions, strategies, summarize
from flows.analysis.outcome import Outcome
from flows.metrics.score import ACCURACY, Score
from flows.records.record import Record
from flows.report.figures.figure import slugs
from flows.report.figures.style import Look, looks

Trial = tuple[Record, Outcome]


@dataclass(frozen=True)
class Subject:
    """An experiment as its figures see it; invalid and failed trials are left out of all.

    Attributes
    ----------
    trials
        The valid ones.
    groups
        The same by strategy and condition, without empty ones.
    strategies, conditions
        In a reader's order.
    looks
        Of each strategy.
    slugs
        Of each strategy and condition, for names of files.
    score
        What its models are scored by.
    """

    trials: tuple[Trial, ...]
    groups: tuple[Group, ...]
    strategies: tuple[str, ...]
    conditions: tuple[str, ...]
    looks: dict[str, Look]
    slugs: dict[str, str]
    score: Score = ACCURACY

    @classmethod
    def of(cls, trials: Sequence[Trial]) -> Subject:
        """Return the subject that trials make up."""
        outcomes = [outcome for _, outcome in trials]
        valid = tuple(trial for trial in trials if trial[1].valid)
        shown = conditions([outcome for _, outcome in valid])
        names = strategies(outcomes)
        return cls(
            trials=valid,
            groups=tuple(group for group in summarize(outcomes) if group.trials),
            strategies=names,
            conditions=shown,
            looks=looks(names),
            slugs=slugs([*shown, *(name for name in names if name not in shown)]),
            score=outcomes[0].score if outcomes else ACCURACY,
        )

    def under(self, condition: str | None, strategy: str | None = None) -> list[Trial]:
        """Return the trials under a condition, of one strategy or of all."""
        return [
            (record, outcome)
            for record, outcome in self.trials
            if outcome.identity.condition == condition
            and strategy in (None, outcome.identity.strategy)
        ]

    def among(self, trials: Sequence[Trial]) -> list[str]:
        """Return the strategies of some trials, in order."""
        found = {outcome.identity.strategy for _, outcome in trials}
        return [name for name in self.strategies if name in found]

    def groups_under(self, condition: str) -> list[Group]:
        """Return the groups under a condition."""
        return [group for group in self.groups if group.condition == condition]

    def faulty(self, condition: str) -> bool:
        """Whether trials under a condition had faults."""
        return any(group.faulty for group in self.groups_under(condition))

    def name(self, kind: str, *parts: str) -> str:
        """Return the name of a drawing of a kind, about a condition or strategy or both."""
        return "-".join([kind, *(slug for part in parts if (slug := self.slugs[part]))])


def titled(title: str, condition: str) -> str:
    """Return a title with the condition that it is about, if there is one."""
    return f"{title}, {condition}" if condition else title


def whole(record: Record) -> bool:
    """Whether the record is of a whole training: one that was resumed begins in the middle."""
    return not record.of(TrialResumed)


def start(record: Record) -> float:
    """When the training started, or the record if it never did."""
    span = training_span(record)
    return span[0] if span else record.events[0].t


def end(record: Record) -> float:
    """When the training ended, or the record if it never started."""
    span = training_span(record)
    return span[1] if span else record.events[-1].t


def mean_of(group: Group, key: str) -> float:
    """Return a figure's mean over a group's trials, 0 without any."""
    spread = group.spread(key)
    return spread.mean if spread else 0.0


def row_names(groups: Sequence[Group]) -> list[str]:
    """Return what groups are called beside one another."""
    several = len({group.condition for group in groups}) > 1
    return [
        f"{group.strategy}, {group.condition}" if several and group.condition else group.strategy
        for group in groups
    ]
