"""Puts what a replication found into a page of documentation, in place of what it found before.

    python -m flows.replication.page PAGE FINDINGS FIGURES

as in `make findings`: FIGURES is where the figures are, beside the page.

The section is that with the heading that the findings begin with, up to the next of its level. What
is written by hand in it goes: comments on the findings belong into other sections.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from flows.files import write_whole

_FIGURE = re.compile(r"(!\[[^\]]*\]\()(?:[^()\s]*/)?([^()\s/]+\))")


def with_section(page: str, findings: str, figures: str) -> str:
    """Return a page with the section that `findings` is, its figures taken from `figures`.

    Raises
    ------
    ValueError
        The page has no section with that heading, or several.
    """
    heading = findings.partition("\n")[0]
    lines = page.split("\n")
    places = [number for number, line in enumerate(lines) if line == heading]
    if len(places) != 1:
        raise ValueError(f"expected one heading {heading!r} in the page; found {len(places)}")
    level = heading.partition(" ")[0] + " "
    start = places[0]
    after = (n for n in range(start + 1, len(lines)) if lines[n].startswith(level))
    end = next(after, len(lines))
    section = _FIGURE.sub(rf"\g<1>{figures}/\g<2>", findings).rstrip("\n")
    return "\n".join([*lines[:start], section, "", *lines[end:]])


if __name__ == "__main__":
    target, source, folder = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    text = with_section(target.read_text("utf-8"), source.read_text("utf-8"), folder)
    write_whole(target, text, "the page")
