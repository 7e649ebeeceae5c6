"""Findings in a page: one section is replaced, the others stay as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flows.replication.ftps.run import TITLE
from flows.replication.page import with_section

PAGE = (
    "# Findings\n\nIn short.\n\n## A paper\n\nold ![x](figures/a/x.svg)\n\n### Table\n\n"
    "## Another\n\nstays\n"
)
NEW = "## A paper\n\nnew, of [it](other.md)\n\n![a (b), c](accuracy.svg)\n\n![d](figures/d.svg)\n"


def test_the_section_with_the_same_heading_is_replaced() -> None:
    assert with_section(PAGE, NEW, "figures/a") == (
        "# Findings\n\nIn short.\n\n## A paper\n\nnew, of [it](other.md)\n\n"
        "![a (b), c](figures/a/accuracy.svg)\n\n![d](figures/a/d.svg)\n\n## Another\n\nstays\n"
    )


def test_the_same_findings_twice_change_nothing_more() -> None:
    once = with_section(PAGE, NEW, "figures/a")
    assert with_section(once, NEW, "figures/a") == once


@pytest.mark.parametrize("page", ["# Findings\n", PAGE + PAGE])
def test_a_page_without_one_such_section_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="expected one heading '## A paper'"):
        with_section(page, NEW, "figures/a")


def test_the_findings_of_both_papers_have_their_sections_in_the_page(tmp_path: Path) -> None:
    page = tmp_path / "findings.md"
    page.write_bytes(Path("docs/findings.md").read_bytes())
    headings = ("## Training Through Failure", f"## {TITLE}")
    for heading in (*headings, *(f"{heading}, on virtual time" for heading in headings)):
        source = tmp_path / "source.md"
        source.write_text(f"{heading}\n\nanew\n", "utf-8")
        command = [sys.executable, "-m", "flows.replication.page", page, source, "figures/x"]
        subprocess.run(command, check=True)
        assert f"{heading}\n\nanew\n\n## " in page.read_text("utf-8")
