"""Which axes of an experiment are numbers: what varies on them, and where values are drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flows.analysis.groups import besides, numbers

FEWEST_VALUES = 3
FEWEST_DOUBLED = 5  # 1 to 16: of fewer the labels have room on an axis that is linear
BETWEEN = " · "  # labels of several axes
# Values whose distances differ by more than this would crowd at one end of an axis to scale.
MOST_UNEVEN = 50.0
# What figures call a setting, with its unit: by the last word of its key, or by its labels' word.
QUANTITIES = {
    "mtbf": "mean time between failures, s",
    "back_after": "fresh node asked for after, s",
}

Labels = Mapping[str, str]  # by axis


@dataclass(frozen=True)
class NumericAxis:
    """An axis whose labels say numbers, such as "4", "4 workers" or "tau inf".

    Attributes
    ----------
    key
        The axis's key in the configuration.
    name
        What the numbers are of: what the labels say besides them, else the last word of the key.
    values
        The number in each label, in ascending order; may end in infinity.
    others
        The axes that tell trials of one value apart: all others but those that vary with this one.
    """

    key: str
    name: str
    values: Mapping[str, float]
    others: tuple[str, ...]

    @property
    def slug(self) -> str:
        """The key as a part of names of files."""
        return self.key.replace(".*", "").replace(".", "-")

    @property
    def title(self) -> str:
        """What the numbers are of, with their unit where it is known."""
        return QUANTITIES.get(self._last_word) or QUANTITIES.get(self.name) or self.name

    @property
    def is_outage(self) -> bool:
        """Whether the numbers are how long nobody asks for a node in place of a lost one."""
        return self._last_word == "back_after"

    @property
    def _last_word(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def doubles(self) -> bool:
        """Whether each value is twice the one before, so that the axis is logarithmic."""
        values = list(self.values.values())
        twice = all(high == 2 * low > 0 for low, high in pairwise(values))
        return len(values) >= FEWEST_DOUBLED and math.isfinite(values[-1]) and twice

    @property
    def to_scale(self) -> bool:
        """Whether values are drawn where they are; else they are drawn at equal distances."""
        if self.doubles:
            return True
        values = list(self.values.values())
        gaps = [high - low for low, high in pairwise(values)]
        return math.isfinite(values[-1]) and max(gaps) <= MOST_UNEVEN * min(gaps)

    @property
    def places(self) -> dict[str, float]:
        """Where each label is drawn."""
        if self.to_scale:
            return dict(self.values)
        return {label: float(place) for place, label in enumerate(self.values)}

    def line(self, labels: Labels) -> str:
        """Return the name of the line that a trial with these labels is on."""
        return BETWEEN.join(labels[axis] for axis in self.others)

    def tick(self, label: str) -> str:
        """Return what is written at a label's place."""
        value = self.values[label]
        return "∞" if math.isinf(value) else f"{value:g}"


def numeric_axes(trials: Sequence[Labels]) -> tuple[NumericAxis, ...]:
    """Return the axes with three or more values that are numbers, given the labels of all trials.

    Of axes that vary together, only the first is returned.
    """
    found: list[NumericAxis] = []
    if any(trial.keys() != trials[0].keys() for trial in trials):
        return ()  # of different experiments
    for key in trials[0] if trials else ():
        labels = list(dict.fromkeys(trial[key] for trial in trials))
        said = numbers(labels)
        if said is None or len(set(said.values())) < max(FEWEST_VALUES, len(labels)):
            continue
        if any(_follows(trials, key, axis.key) for axis in found):
            continue
        others = tuple(axis for axis in trials[0] if not _follows(trials, axis, key))
        values = dict(sorted(said.items(), key=lambda item: item[1]))
        found.append(NumericAxis(key, _name(key, labels), values, others))
    return tuple(found)


def _name(key: str, labels: Sequence[str]) -> str:
    words = max((besides(label) for label in labels), key=len)
    return words or key.rpartition(".")[2].replace("_", " ")


def _follows(trials: Sequence[Labels], axis: str, leader: str) -> bool:
    """Whether one axis's label follows from another's in all trials; an axis does from itself."""
    pairs = {(trial[leader], trial[axis]) for trial in trials}
    return len(pairs) == len({leading for leading, _ in pairs})
