"""Insert the API reference of all kinds in a group, such as all update rules of experiments.

A page marks the place with `<!-- kinds: RULES -->`.
"""

from __future__ import annotations

import re
from typing import Any

from flows.config import faults, kinds
from flows.config.sections import Group

MARK = re.compile(r"<!-- kinds: (\w+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks of a page with reference entries."""
    return MARK.sub(lambda mark: entries({**vars(kinds), **vars(faults)}[mark[1]]), markdown)


def entries(group: Group) -> str:
    """Return a reference entry for each class in the group that dps defines."""
    options = "    options:\n      heading_level: 3\n      members: false"
    return "\n\n".join(f"::: {cls.__module__}.{cls.__qualname__}\n{options}" for cls in group.own)
