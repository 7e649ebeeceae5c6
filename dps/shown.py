"""How what a user chose is shown, as a line of text and, in a notebook, as a small table.

The HTML has no script and no fixed colours: it takes those of the page that it is shown on, so it
can be read on a light one and on a dark one, and stays as it is in a notebook that was saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape
from typing import Any

_TABLE = "border-collapse:collapse;margin:0.4em 0"
_CELL = (
    "padding:0.2em 1em 0.2em 0;text-align:left;vertical-align:top;background:none;"
    "border-bottom:1px solid rgba(128,128,128,0.35)"
)


class Shown:
    """A frozen dataclass of settings that a notebook shows with its purpose and all settings."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        first = (type(self).__doc__ or "").strip().split("\n\n")[0].replace("`", "")
        settings = [
            (field.name, brief(getattr(self, field.name)))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        ]
        return block(type(self).__name__, " ".join(first.split()), pairs_html(settings))


def brief(choice: Any) -> str:
    """Return what was chosen as Python writes it, without settings that are left as they are."""
    if not dataclasses.is_dataclass(choice) or isinstance(choice, type):
        return repr(choice)
    said = []
    by_place = True
    for field in dataclasses.fields(choice):
        value = getattr(choice, field.name)
        if field.default is dataclasses.MISSING and by_place:
            said.append(brief(value))
        elif field.default is dataclasses.MISSING or value != field.default:
            said.append(f"{field.name}={brief(value)}")
        by_place = by_place and field.default is dataclasses.MISSING
    return f"{type(choice).__name__}({', '.join(said)})"


def block(title: str, below: str, *parts: str) -> str:
    """Return HTML with a title, a line below it, and whatever follows."""
    return (
        f'<div style="line-height:1.4"><div><b>{escape(title)}</b></div>'
        f'<div style="opacity:0.75">{escape(below)}</div>{"".join(parts)}</div>'
    )


def pairs_html(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a table of names and what was chosen as each."""
    rows = "".join(
        f'<tr style="background:none"><td style="{_CELL};opacity:0.75">{escape(name)}</td>'
        f'<td style="{_CELL}"><code>{escape(value)}</code></td></tr>'
        for name, value in pairs
    )
    return f'<table style="{_TABLE}"><tbody>{rows}</tbody></table>' if pairs else ""


def table_html(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a line of headings."""
    head = "".join(f'<th style="{_CELL};font-weight:600">{escape(name)}</th>' for name in columns)
    body = "".join(
        '<tr style="background:none">'
        + "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in row)
        + "</tr>"
        for row in rows
    )
    return f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
