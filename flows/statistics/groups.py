"""Groups of trials by strategy and condition, and their order."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flows.metrics.outcome import Outcome

_NUMBER = re.compile(r"(?<![\w.])-?(\d+(\.\d+)?(e-?\d+)?|inf|∞)(?![\w.])")


def numbers(labels: Sequence[str]) -> dict[str, float] | None:
    """Return the number in each label; None unless each has one, and the other text is equal."""
    by_label = {label: [match[0] for match in _NUMBER.finditer(label)] for label in labels}
    rest = {_NUMBER.sub("", label).strip(" =").removesuffix("s") for label in labels}
    if any(len(digits) != 1 for digits in by_label.values()) or len(rest) > 1:
        return None
    return {label: float(number.replace("∞", "inf")) for label, (number,) in by_label.items()}


@dataclass(frozen=True, slots=True)
class Group:
    """The trials that differ by nothing but their seed; `left_out` are the invalid and failed."""

    strategy: str
    condition: str
    trials: tuple[Outcome, ...]
    left_out: tuple[Outcome, ...]


def summarize(outcomes: Sequence[Outcome]) -> tuple[Group, ...]:
    """Group trials by condition and strategy, in the order of `conditions` and `strategies`."""
    members = defaultdict[tuple[str, str], list[Outcome]](list)
    for each in outcomes:
        members[each.identity.condition, each.identity.strategy].append(each)
    return tuple(
        Group(
            strategy,
            condition,
            trials=tuple(each for each in group if each.valid),
            left_out=tuple(each for each in group if not each.valid),
        )
        for condition in conditions(outcomes)
        for strategy in strategies(outcomes)
        if (group := members[condition, strategy])
    )


def strategies(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the strategies in order of appearance (see `place`)."""
    return tuple(dict.fromkeys(outcome.identity.strategy for outcome in outcomes))


def conditions(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the conditions in the order in which they appear (see `place`)."""
    return tuple(dict.fromkeys(outcome.identity.condition for outcome in outcomes))


def place(outcome: Outcome, labels: Mapping[str, Sequence[str]]) -> tuple[int, ...]:
    """Return the sort key of a trial among others of its experiment.

    Sorts by condition, then strategy, in the order of the configuration, which `labels` has by
    axis. Unknown labels come last; trials without a fault come first among equals.
    """
    own, strategy = outcome.identity.labels, outcome.identity.strategy_axis
    axes = sorted(labels, key=lambda axis: axis == strategy)
    places = [
        labels[axis].index(own[axis]) if own.get(axis) in labels[axis] else len(labels[axis])
        for axis in axes
    ]
    return (*places, int(bool(outcome.faults)))
