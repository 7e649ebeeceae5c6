"""Insert the API reference of all kinds in a group, such as all update rules, and of events.

A page marks the place with `<!-- kinds: RULES -->` or `<!-- events of dps.events: Applied … -->`.
"""

from __future__ import annotations

import re
from typing import Any

from flows.config import faults, kinds
from flows.config.sections import Group

KINDS = re.compile(r"<!-- kinds: (\w+) -->")
EVENTS = re.compile(r"<!-- events of (\S+):([\w\s]+)-->")
OPTIONS = "    options:\n      heading_level: 3\n"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks of a page with reference entries."""
    markdown = EVENTS.sub(lambda mark: events(mark[1], mark[2].split()), markdown)
    return KINDS.sub(lambda mark: entries({**vars(kinds), **vars(faults)}[mark[1]]), markdown)


def entries(group: Group) -> str:
    """Return a reference entry for each class in the group that dps defines."""
    names = [f"{cls.__module__}.{cls.__qualname__}" for cls in group.own]
    return "\n\n".join(f"::: {name}\n{OPTIONS}      members: false" for name in names)


def events(module: str, names: list[str]) -> str:
    """Return a reference entry for each event, also for those without a docstring."""
    shown = f"{OPTIONS}      show_if_no_docstring: true"
    return "\n\n".join(f"::: {module}.{name}\n{shown}" for name in names)
