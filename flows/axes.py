"""Owns the values of an axis: each has a label that reads well in a table, a name and a legend."""

from __future__ import annotations

from typing import Any

from flows.sections import refuse


def labelled(key: str, values: Any) -> Any:
    """Return the values of an axis by label."""
    if key.split(".")[0] in ("experiment", "axes", "seed", "seeds", "comparison"):
        refuse("cannot be an axis; give seeds as 'seeds: [0, 1]'", key=key)
    if not isinstance(values, list | tuple | dict) or not values:
        refuse("expected a list of values, or labels with values; at least one", key=key)
    if isinstance(values, dict):
        labels = [_label_text(key, label) for label in values]
        values = list(values.values())
    else:
        labels = [_label(value) for value in values]
    twice = [label for label in labels if labels.count(label) > 1]
    if twice:
        refuse(f"{twice[0]!r} is given twice; keep one of them", key=key)
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
