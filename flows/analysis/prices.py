"""The price table: USD per node-hour, per GB moved and per GB-month stored, with sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from dps.core.names import NODE_ROLES
from dps.errors import ConfigurationError

WAYS_TO_RENT = ("node_hour", "spot_hour", "fixed_hour")


@dataclass(frozen=True, slots=True)
class Prices:
    """List prices in USD; a GB is 10^9 bytes, a month 30 days.

    Scheduler and driver cost the same under every strategy, and are left out.

    Attributes
    ----------
    node_hour, spot_hour, fixed_hour
        One hour of one node, by its role: on demand, as a spot instance, and rented for a fixed
        term.
    gb_moved
        One GB of messages from node to node.
    gb_month_stored
        One GB kept for a month.
    sources
        For each entry of the table, where the price is from and of which date.
    """

    node_hour: Mapping[str, float]
    spot_hour: Mapping[str, float]
    fixed_hour: Mapping[str, float]
    gb_moved: float
    gb_month_stored: float
    sources: Mapping[str, str]


def load_prices(path: Path | None = None) -> Prices:
    """Read a price table; without a path, the one that comes with the package.

    Raises
    ------
    ConfigurationError
        The file cannot be read, or lacks a price, its source or its date.
    """
    where = "prices.yaml" if path is None else str(path)
    try:
        text = (files("flows.analysis") / "prices.yaml" if path is None else path).read_text(
            "utf-8"
        )
        table = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"price table {where} cannot be read: {error}") from error
    hours = [f"{way}.{role}" for way in WAYS_TO_RENT for role in NODE_ROLES]
    keys = [*hours, "gb_moved", "gb_month_stored"]
    entries = {key: _entry(table, key, where) for key in keys}
    hour = {way: {role: entries[f"{way}.{role}"][0] for role in NODE_ROLES} for way in WAYS_TO_RENT}
    return Prices(
        **hour,
        gb_moved=entries["gb_moved"][0],
        gb_month_stored=entries["gb_month_stored"][0],
        sources={key: source for key, (_, source) in entries.items()},
    )


def _entry(table: Any, key: str, where: str) -> tuple[float, str]:
    """Return the price at a dotted key, and its source with the date."""
    found = table
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    match found:
        case {"usd": int(usd) | float(usd), "source": str(source), "date": date} if usd >= 0:
            return float(usd), f"{source} ({date})"
    raise ConfigurationError(
        f"price table {where}: {key} needs usd (0 or more), source (text) and date; got {found!r}"
    )
