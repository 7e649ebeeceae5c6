"""How what a user chose is shown, as a line of text and, in a notebook, as a small table.

The HTML has no script and no fixed colours: it takes those of the page that it is shown on, so it
can be read on a light one and on a dark one, and stays as it is in a notebook that was saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape
from typing import Any

LONGEST_REASON = 300

_TABLE = "border-collapse:collapse;margin:0.4em 0"
_CELL = (
    "padding:0.2em 1em 0.2em 0;text-align:left;vertical-align:top;background:none;"
    "border-bottom:1px solid rgba(128,128,128,0.35)"
)


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


def in_a_line(text: str) -> str:
    """Return a text that may quote the contents of a file, in one printable line."""
    printable = text if text.isprintable() else repr(text)[1:-1]
    if len(printable) <= LONGEST_REASON:
        return printable
    return f"{printable[: LONGEST_REASON - 1]}…"


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
