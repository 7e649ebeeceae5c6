"""How a replication is handed over: a page of HTML, ready-made Markdown, figures and points.

Everything is written anew from the records each time, into one folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.files import write_whole
from flows.replication.charts import Chart
from flows.replication.claims import HEADINGS, Claim, markdown_table
from flows.replication.verdicts import Verdicts
from flows.report.html import page

TEMPLATE = "replication/replication.jinja"
PAGE, TEXT, FIGURES = "replication.html", "findings.md", "figures"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headings."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        """Return title and rows as parts of a text."""
        return [f"### {self.title}", markdown_table(self.headings, self.rows)]


@dataclass(frozen=True, slots=True)
class Findings:
    """What came out of a replication.

    Attributes
    ----------
    title
        Of the page and of the section.
    introduction
        Paragraphs: what was repeated, how, and what is different.
    claims
        The paper's claims with their verdicts.
    tables, charts
        What the claims rest on.
    verdicts
        The claims, for another version to be set beside.
    """

    title: str
    introduction: Sequence[str]
    claims: Sequence[Claim]
    tables: Sequence[Table]
    charts: Sequence[Chart]
    verdicts: Verdicts

    def write(self, folder: Path) -> Path:
        """Write page, Markdown and figures; return where the page is.

        Raises
        ------
        StoreUnavailable
            The folder cannot be written.
        """
        for chart in self.charts:
            chart.write(folder / FIGURES)
        write_whole(folder / TEXT, self.markdown(), "the findings")
        self.verdicts.write(folder)
        page = folder / PAGE
        write_whole(page, self.html(), "the findings")
        return page

    def markdown(self) -> str:
        """Return the section for `docs/findings.md`; its figures are beside it."""
        parts = [f"## {self.title}", *self.introduction]
        for table in self._all_tables():
            parts += table.markdown()
        for chart in self.charts:
            parts.append(f"![{chart.caption}]({FIGURES}/{chart.name}.svg)")
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        """Return one page that needs nothing else."""
        return page(
            TEMPLATE,
            title=self.title,
            introduction=self.introduction,
            tables=self._all_tables(),
            charts=self.charts,
        )

    def _all_tables(self) -> list[Table]:
        claims = Table("Claims", HEADINGS, [claim.row for claim in self.claims])
        return [claims, *self.tables]
