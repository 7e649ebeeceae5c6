"""How trials are grouped and summed up: per strategy and condition, mean and range over seeds.

Only valid trials enter; with a handful of seeds a range is all that can honestly be said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dps.protocol.durabilities.presets import PRESETS
from flows.analysis.outcome import Outcome

_NUMBER = re.compile(r"(?<![\w.])-?(\d+(\.\d+)?(e-?\d+)?|inf|∞)(?![\w.])")


def numbers(labels: Sequence[str]) -> dict[str, float] | None:
    """Return the number in each label; None unless each has one, and all say the same besides."""
    found = {label: [match[0] for match in _NUMBER.finditer(label)] for label in labels}
    if any(len(said) != 1 for said in found.values()):
        return None
    if len({besides(label).removesuffix("s") for label in labels}) > 1:
        return None
    return {label: float(number.replace("∞", "inf")) for label, (number,) in found.items()}


def besides(label: str) -> str:
    """Return what a label says besides its number: "workers" for "4 workers"."""
    return _NUMBER.sub("", label).strip(" =")


def in_order(labels: Sequence[str]) -> list[str]:
    """Return labels that say numbers in the order of these, others as they are."""
    found = numbers(labels)
    return list(labels) if found is None else sorted(labels, key=found.__getitem__)


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the trials of a group that have it."""

    mean: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Group:
    """The trials that differ by nothing but their seed; `left_out` are the invalid and failed."""

    strategy: str
    condition: str
    trials: tuple[Outcome, ...]
    left_out: tuple[Outcome, ...]

    @property
    def faulty(self) -> bool:
        """Whether its trials had a fault."""
        return any(trial.faults for trial in (*self.trials, *self.left_out))

    def spread(self, key: str) -> Spread | None:
        """Return mean and range of a figure of `Outcome.row()`; None when no trial has it."""
        values = [float(v) for trial in self.trials if (v := trial.row()[key]) is not None]
        if not values:
            return None
        return Spread(sum(values) / len(values), min(values), max(values), len(values))


def summarize(outcomes: Sequence[Outcome]) -> tuple[Group, ...]:
    """Group trials by condition and strategy, in the order of `conditions` and `strategies`."""
    groups = [
        _group(outcomes, strategy, condition)
        for condition in conditions(outcomes)
        for strategy in strategies(outcomes)
    ]
    return tuple(group for group in groups if group.trials or group.left_out)


def strategies(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the strategies that appear, in the order of the configuration (see `ranked`).

    Where that was not noted of all of them, presets come first, in their order, and then the
    others, in the order of the numbers that they say, else as they appear.
    """
    ranks = {outcome.identity.strategy: outcome.identity.rank for outcome in outcomes}
    found, noted = list(ranks), {s: rank for s, rank in ranks.items() if rank is not None}
    if len(noted) == len(found):
        return tuple(sorted(found, key=noted.__getitem__))
    known = [name for name in PRESETS if name in found]
    return (*known, *in_order([name for name in found if name not in PRESETS]))


def conditions(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the conditions in the order in which they appear (see `place`)."""
    return tuple(dict.fromkeys(outcome.identity.condition for outcome in outcomes))


def ranked(outcome: Outcome, labels: Mapping[str, Sequence[str]]) -> Outcome:
    """Return a trial that knows the place of its strategy in `labels`, which are given by axis."""
    own = outcome.identity
    order = labels.get(_strategy_axis(own.labels) or "", ())
    rank = order.index(own.strategy) if own.strategy in order else None
    return replace(outcome, identity=replace(own, rank=rank))


def place(outcome: Outcome, labels: Mapping[str, Sequence[str]]) -> tuple[int, ...]:
    """Return where a trial belongs among others of its experiment, to sort them by.

    By its condition, then its strategy, in the order of the configuration, which `labels` has by
    axis. What is not in there comes last, those without a fault first.
    """
    own = outcome.identity.labels
    strategy = _strategy_axis(own)
    axes = sorted(labels, key=lambda axis: axis == strategy)
    found = [
        labels[axis].index(own[axis]) if own.get(axis) in labels[axis] else len(labels[axis])
        for axis in axes
    ]
    return (*found, int(bool(outcome.faults)))


def _strategy_axis(labels: Mapping[str, str]) -> str | None:
    return "recovery" if "recovery" in labels else next(iter(labels), None)


def _group(outcomes: Sequence[Outcome], strategy: str, condition: str) -> Group:
    members = [
        o for o in outcomes if o.identity.strategy == strategy and o.identity.condition == condition
    ]
    return Group(
        strategy,
        condition,
        trials=tuple(o for o in members if o.valid),
        left_out=tuple(o for o in members if not o.valid),
    )
