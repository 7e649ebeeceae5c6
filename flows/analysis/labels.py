"""Owns the numbers that labels on an axis say, such as "4", "4 workers" or "tau inf"."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
