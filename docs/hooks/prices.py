"""The price table of the documentation, which is drawn from `flows/analysis/prices.yaml`.

A page has it where it says `<!-- prices -->`.
"""

from __future__ import annotations

from typing import Any

from dps.core.names import NODE_ROLES
from flows.analysis.prices import WAYS_TO_RENT, load_prices

MARK = "<!-- prices -->"
WAYS = {"node_hour": "on demand", "spot_hour": "spot", "fixed_hour": "fixed term"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables where a page asks for them."""
    return markdown.replace(MARK, price_tables()) if MARK in markdown else markdown


def price_tables() -> str:
    """Return what a node, a gigabyte moved and one stored cost, and where each price is from."""
    prices = load_prices()
    hours = [getattr(prices, way) for way in WAYS_TO_RENT]
    used: dict[str, list[str]] = {}
    for key, source in prices.sources.items():
        used.setdefault(source, []).append(f"`{key}`")
    lines = [
        _row("one node for an hour, USD", *(WAYS[way] for way in WAYS_TO_RENT)),
        _row("---", *["---:"] * len(hours)),
        *(_row(role, *(f"{hour[role]:g}" for hour in hours)) for role in NODE_ROLES),
        "",
        _row("one GB, USD", ""),
        _row("---", "---:"),
        _row("moved between nodes", f"{prices.gb_moved:g}"),
        _row("stored for a month", f"{prices.gb_month_stored:g}"),
        "",
        _row("price", "where it is from"),
        _row("---", "---"),
        *(_row(", ".join(keys), source) for source, keys in used.items()),
    ]
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
