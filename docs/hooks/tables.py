"""Insert tables generated from the package: prices, and the metrics of experiments.

A page marks the place with `<!-- prices -->` or `<!-- metrics -->`.
"""

from __future__ import annotations

from typing import Any

from dps.core.names import NODE_ROLES
from flows.metrics import SECTIONS, TRACKED
from flows.metrics.prices import load_prices


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks of a page with tables."""
    for mark, tables in {"prices": price_tables, "metrics": metric_tables}.items():
        if f"<!-- {mark} -->" in markdown:
            markdown = markdown.replace(f"<!-- {mark} -->", tables())
    return markdown


def metric_tables() -> str:
    """Return a table of the metrics of each section, without columns that would be empty."""
    lines = []
    for title, section in SECTIONS.items():
        rows = [("metric", "unit, better", "MLflow", "definition")]
        for each in section:
            tracked = TRACKED.get(each.key, "").replace("/", "/<wbr>")
            unit = ", ".join(filter(None, (each.plain_unit, each.better)))
            rows.append((f"`{each.key}`", unit, tracked, each.text))
        columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
        head, *body = (_row(*cells) for cells in zip(*columns, strict=True))
        lines += [f"## {title}\n", head, _row(*len(columns) * ["---"]), *body, ""]
    return "\n".join(lines)


def price_tables() -> str:
    """Return tables of the prices of nodes, traffic and storage, and of their sources."""
    prices = load_prices()
    entries = {
        **{f"node_hour.{role}": price for role, price in prices.node_hour.items()},
        **{f"fixed_hour.{role}": price for role, price in prices.fixed_hour.items()},
        "gb_moved": prices.gb_moved,
        "gb_month_stored": prices.gb_month_stored,
    }
    used: dict[str, list[str]] = {}
    for key, price in entries.items():
        used.setdefault(str(price), []).append(f"`{key}`")
    hours = [(role, prices.node_hour[role], prices.fixed_hour[role]) for role in NODE_ROLES]
    lines = [
        _row("node-hour, USD", "on demand", "fixed term"),
        _row("---", "---:", "---:"),
        *(_row(role, f"{node.usd:g}", f"{fixed.usd:g}") for role, node, fixed in hours),
        "",
        _row("GB, USD", ""),
        _row("---", "---:"),
        _row("moved between nodes", f"{prices.gb_moved.usd:g}"),
        _row("stored for one month", f"{prices.gb_month_stored.usd:g}"),
        "",
        _row("price", "source"),
        _row("---", "---"),
        *(_row(", ".join(keys), source) for source, keys in used.items()),
    ]
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
