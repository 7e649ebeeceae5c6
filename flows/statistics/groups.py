"""Groups of trials by strategy and condition, and their order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product

from flows.metrics.outcome import Outcome

_NUMBER = re.compile(r"(?<![\w.])-?(\d+(\.\d+)?(e-?\d+)?|inf|∞)(?![\w.])")


def numbers(labels: Sequence[str]) -> dict[str, float] | None:
    """Return the number in each label; None unless each has one, and the other text is equal."""
    by_label = {label: [match[0] for match in _NUMBER.finditer(label)] for label in labels}
    rest = {_NUMBER.sub("", label).strip(" =").removesuffix("s") for label in labels}
    if any(len(digits) != 1 for digits in by_label.values()) or len(rest) > 1:
        return None
    return {label: float(number.replace("∞", "inf")) for label, (number,) in by_label.items()}


def by_place(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    """Return trials by condition and strategy, in the order of `conditions` and `strategies`."""
    members: dict[tuple[str, str], list[Outcome]] = {
        place: [] for place in product(conditions(outcomes), strategies(outcomes))
    }
    for each in outcomes:
        members[each.identity.condition, each.identity.strategy].append(each)
    return {place: group for place, group in members.items() if group}


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
