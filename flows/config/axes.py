"""The axes of a grid: the labels of their values, and which combinations of them there are.

Axes vary independently, but for those that vary together (`zip`); combinations may be left out
(`exclude`). How many there are is counted without going through them, so that a grid that is far
too large is noticed at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from flows.config.errors import refuse, suggest
from flows.config.limits import LONGEST_KEY, MOST_AXES, MOST_COMBINATIONS, MOST_EXCLUDED
from flows.quoting import listed, quoted

OF_THE_GRID = ("axes", "zip", "exclude", "seeds", "order_seed", "comparison", "claims")
NO_AXES = ("experiment", "seed", *OF_THE_GRID)

Labels = Mapping[str, str]  # by axis
Left = frozenset[tuple[str, str]]  # what is left to be met of an entry of `exclude`


@dataclass(frozen=True)
class Combinations:
    """The combinations of labels that a grid is made of.

    Attributes
    ----------
    axes
        The labels of each axis.
    together
        Groups of axes that vary together: the first label of one goes with the first of the others.
    excluded
        Labels on some axes; a combination that has all of them is left out.
    """

    axes: Mapping[str, Sequence[str]]
    together: Sequence[Sequence[str]] = ()
    excluded: Sequence[Labels] = ()

    def __iter__(self) -> Iterator[dict[str, str]]:
        """Yield the label on each axis, in the order of the axes; the last axis varies fastest."""
        excluded = [frozenset(entry.items()) for entry in self.excluded]
        for rows in product(*self._groups()):
            chosen = {axis: label for row in rows for axis, label in row.items()}
            labels = {axis: chosen[axis] for axis in self.axes}
            if not any(entry <= labels.items() for entry in excluded):
                yield labels

    @property
    def before(self) -> int:
        """How many there would be if none were left out."""
        return prod(map(len, self._groups()))

    @property
    def count(self) -> int:
        """How many there are."""
        return _count(self._groups(), frozenset(frozenset(e.items()) for e in self.excluded))

    def has(self, labels: Labels) -> bool:
        """Whether there would be a combination with these labels if none were left out."""
        left = frozenset(labels.items())
        return all(any(_goes_on(left, row) is not None for row in rows) for rows in self._groups())

    def _groups(self) -> list[list[Labels]]:
        """For each axis, or axes that vary together, the labels that it can have at a time."""
        partners = {axis: group for group in self.together for axis in group}
        found: list[list[Labels]] = []
        seen: set[str] = set()
        for axis in self.axes:
            if axis not in seen:
                group = partners.get(axis, (axis,))
                seen.update(group)
                columns = [self.axes[member] for member in group]
                rows = zip(*columns, strict=True)
                found.append([dict(zip(group, row, strict=True)) for row in rows])
        return found


def _count(groups: Sequence[Sequence[Labels]], excluded: frozenset[Left]) -> int:
    """Count the combinations that meet no entry of `excluded`.

    Labels that no entry names lead to the same rest, so that each is counted once.
    """
    if frozenset() in excluded:
        return 0
    if not excluded:
        return prod(map(len, groups))
    first, *others = groups
    rests = Counter(
        frozenset(left for entry in excluded if (left := _goes_on(entry, row)) is not None)
        for row in first
    )
    return sum(number * _count(others, rest) for rest, number in rests.items())


def _goes_on(entry: Left, row: Labels) -> Left | None:
    """What is left to be met of an entry under these labels; None if they contradict it."""
    if any(row.get(axis, label) != label for axis, label in entry):
        return None
    return frozenset((axis, label) for axis, label in entry if axis not in row)


# -- what may be written -------------------------------------------------------------------------


def check_extent(combinations: Combinations) -> None:
    """Refuse more axes, entries of `exclude` or combinations than can be gone through."""
    if len(combinations.axes) > MOST_AXES:
        refuse(f"expected {MOST_AXES} axes at most, got {len(combinations.axes):,}", key="axes")
    if len(combinations.excluded) > MOST_EXCLUDED:
        number = len(combinations.excluded)
        refuse(f"expected {MOST_EXCLUDED} entries at most, got {number:,}", key="exclude")
    if (number := combinations.before) > MOST_COMBINATIONS:
        refuse(
            f"the axes have {number:,} combinations before any is left out; expected "
            f"{MOST_COMBINATIONS:,} at most",
            key="axes",
        )


def check_together(axes: Mapping[str, Sequence[str]], together: Sequence[Sequence[str]]) -> None:
    """Refuse groups of axes that cannot vary together."""
    seen: dict[str, int] = {}
    for index, group in enumerate(together):
        key = f"zip.{index}"
        if len(group) < 2:
            refuse("expected two axes or more that vary together", key=key)
        for axis in group:
            if axis not in axes:
                refuse(f"there is no axis {quoted(axis)}; {suggest(axis, axes)}", key=key)
            if axis in seen:
                refuse(
                    f"{quoted(axis)} stands in two places; an axis varies with one group", key=key
                )
            seen[axis] = index
        if len({len(axes[axis]) for axis in group}) > 1:
            lengths = listed((f"{axis} has {len(axes[axis])}" for axis in group), MOST_AXES)
            refuse(f"axes that vary together need as many values each: {lengths}", key=key)


def check_excluded(combinations: Combinations) -> None:
    """Refuse entries that leave out nothing, and entries that leave out everything."""
    for index, entry in enumerate(combinations.excluded):
        _check_entry(combinations, entry, f"exclude.{index}")
    if not combinations.count:
        refuse("every combination is left out, so that there is no trial to run", key="exclude")


def _check_entry(combinations: Combinations, entry: Labels, key: str) -> None:
    if not entry:
        refuse("expected labels by axis, such as {recovery: none}", key=key)
    for axis, label in entry.items():
        if axis not in combinations.axes:
            refuse(f"there is no axis {quoted(axis)}; {suggest(axis, combinations.axes)}", key=key)
        if label not in combinations.axes[axis]:
            known = suggest(label, combinations.axes[axis])
            refuse(
                f"matches nothing: no value is labelled {quoted(label)}; {known}",
                key=f"{key}.{axis}",
            )
    if not combinations.has(entry):
        refuse("matches nothing, for these axes vary together (zip)", key=key)


def excluded_labels(entries: Any) -> Any:
    """Return the entries of `exclude` with their labels as texts, as axes have them."""
    if not isinstance(entries, list | tuple):
        return entries
    return tuple(
        {str(axis): _label(label) for axis, label in entry.items()}
        if isinstance(entry, dict)
        else entry
        for entry in entries
    )


def labelled(key: str, values: Any) -> Any:
    """Return the values of an axis by label."""
    if key.split(".")[0] in NO_AXES:
        refuse("cannot be an axis; give seeds as 'seeds: [0, 1]'", key=key)
    if not isinstance(values, list | tuple | dict) or not values:
        refuse("expected a list of values, or labels with values; at least one", key=key)
    if len(values) > MOST_COMBINATIONS:
        refuse(f"expected {MOST_COMBINATIONS:,} values at most, got {len(values):,}", key=key)
    if isinstance(values, dict):
        labels = [_label_text(key, label) for label in values]
        values = list(values.values())
    else:
        labels = [_label(value) for value in values]
    twice = [label for label, count in Counter(labels).items() if count > 1]
    if twice:
        refuse(f"{quoted(twice[0])} is given twice; keep one of them", key=key)
    if len(longest := max(labels, key=len)) > LONGEST_KEY:
        refuse(
            f"what {quoted(longest)} says is too long for a label; give labels with the values, as "
            "in {short: …}",
            key=key,
        )
    return dict(zip(labels, values, strict=True))


def _label_text(key: str, label: Any) -> str:
    if isinstance(label, bool) or label is None:
        refuse(f"YAML reads the label {label!r} as no text; put it in quotes", key=key)
    return str(label)


def _label(value: Any) -> str:
    """Say a value in few words: a preset or kind by its name, then its settings."""
    if isinstance(value, dict):
        named = [str(value[key]) for key in ("preset", "kind") if key in value]
        rest = [f"{k}={_label(v)}" for k, v in value.items() if k not in ("preset", "kind")]
        return " ".join([*named, *rest])
    if isinstance(value, list | tuple):
        return ", ".join(map(_label, value)) or "none"
    return "null" if value is None else str(value)
