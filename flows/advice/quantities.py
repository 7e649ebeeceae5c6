"""Sizes and durations as people write them: 400MB, 1.5GiB, 200ms, 40min, 6h."""

from __future__ import annotations

import math
import re

from dps.errors import ConfigurationError
from flows.quoting import quoted

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?) ?([A-Za-z]*)")
_BYTES = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    "KB": 1000,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str, option: str) -> int:
    """Return the bytes that a text such as "400MB" stands for.

    Raises
    ------
    ConfigurationError
        It is none, or has no unit; `option` is where it was given.
    """
    nbytes = _parsed(text, _BYTES)
    if nbytes is None or nbytes < 1:
        raise ConfigurationError(
            f"{option} {quoted(text)}: expected a size of 1 byte or more with its unit, such as "
            "400MB or 1.5GiB"
        )
    return round(nbytes)


def parse_duration(text: str, option: str) -> float:
    """Return the seconds that a text such as "6h" stands for; a bare number is seconds.

    Raises
    ------
    ConfigurationError
        It is none, or not more than 0; `option` is where it was given.
    """
    seconds = _parsed(text, {"": 1.0, **_SECONDS})
    if not seconds:
        raise ConfigurationError(
            f"{option} {quoted(text)}: expected a time of more than 0, in seconds or with ms, s, "
            "min, h or d, such as 0.2, 40min or 6h"
        )
    return seconds


def size_text(nbytes: float) -> str:
    """Return a size as people say it: "400 MB"."""
    for unit in ("TB", "GB", "MB", "kB"):
        if nbytes >= _BYTES[unit]:
            return f"{nbytes / _BYTES[unit]:.3g} {unit}"
    return f"{nbytes:g} B"


def duration_text(seconds: float) -> str:
    """Return a time as people say it, to two or three digits: "40 min"."""
    years = seconds / (365 * _SECONDS["d"])
    if years >= 2:
        return f"{years:,.0f} years" if years < 1e6 else "a million years and more"
    for unit in ("d", "h", "min", "s"):
        if seconds >= 2 * _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _parsed(text: str, units: dict[str, float] | dict[str, int]) -> float | None:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None or found[2] not in units:
        return None
    amount = float(found[1]) * units[found[2]]
    return amount if math.isfinite(amount) else None
