"""The axes of a grid: the labels of their values, and the seeds."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from flows.config.errors import check_known, refuse
from flows.quoting import quoted

MAX_TRIALS = 10_000


def check_labels(labels: Mapping[str, str], axes: Mapping[str, Collection[str]], key: str) -> None:
    """Refuse labels that are on no axis; `key` is where they are written."""
    if not labels:
        refuse("expected labels by axis, such as {recovery: none}", key=key)
    for axis, label in labels.items():
        check_known(axis, axes, "axis", key)
        check_known(label, axes[axis], "label", f"{key}.{axis}")


# -- what may be written -------------------------------------------------------------------------


def label_texts(label: Any) -> Any:
    """Return a label as text even if YAML has read a number; or labels by axis.

    >>> label_texts({"training.workers": 4})
    {'training.workers': '4'}
    """
    if isinstance(label, dict):
        return {str(axis): label_texts(each) for axis, each in label.items()}
    if isinstance(label, bool) or label is None:
        refuse(f"expected text, but YAML reads {label!r}; put the label in quotes")
    return str(label)


def seeds_of(seeds: Any) -> Any:
    """Return the seeds that a count (40: 0 to 39) or a range ("100-139") stands for.

    >>> seeds_of("100-102")
    (100, 101, 102)
    """
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        first, last = 0, seeds - 1
    elif isinstance(seeds, str):
        ends = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", seeds)
        if ends is None:
            refuse(f"expected a count, a list or a range such as 100-139; got {quoted(seeds)}")
        if int(ends[1]) > int(ends[2]):
            refuse(f"a range ends with its largest seed; expected {ends[2]}-{ends[1]}")
        first, last = int(ends[1]), int(ends[2])
    else:
        return seeds
    if last - first >= MAX_TRIALS:
        refuse(f"{last - first + 1:,} seeds; expected {MAX_TRIALS:,} at most")
    return tuple(range(first, last + 1))


def labelled(axes: Any) -> Any:
    """Return the values of each axis by label."""
    return {k: _labelled(str(k), v) for k, v in axes.items()} if isinstance(axes, dict) else axes


def _labelled(key: str, values: Any) -> dict[str, Any]:
    if key in ("experiment", "seed"):
        refuse("cannot be an axis; give seeds as 'seeds: [0, 1]'", key=key)
    if not isinstance(values, list | tuple | dict) or not values:
        refuse(
            "expected a list of values, or labels with values, and at least one of them", key=key
        )
    if isinstance(values, dict):
        return {label_texts(label): value for label, value in values.items()}
    labels = [label_of(value) for value in values]
    if len(set(labels)) < len(labels):
        refuse(f"a value is given twice in {quoted(labels)}; keep one of them", key=key)
    return dict(zip(labels, values, strict=True))


def label_of(value: Any) -> str:
    """Return a short description of a value: the name of a preset or kind, then its settings.

    >>> label_of({"kind": "ssp", "tau": 2})
    'ssp tau=2'
    """
    if isinstance(value, dict):
        named = [str(value[key]) for key in ("preset", "kind") if key in value]
        rest = [f"{k}={label_of(v)}" for k, v in value.items() if k not in ("preset", "kind")]
        return " ".join([*named, *rest])
    if isinstance(value, list | tuple):
        return ", ".join(map(label_of, value)) or "none"
    return "null" if value is None else str(value)
