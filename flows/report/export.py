"""Files of an experiment: tables as CSV or LaTeX, figures with their data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.files import write_whole
from flows.report import figures, style, tables
from flows.report.study import Study

if TYPE_CHECKING:
    import pandas as pd

CAPTION = "Means over valid trials; in brackets the lowest and highest value over seeds."


def export(
    study: Study,
    folder: Path,
    table_forms: Sequence[str] = ("csv",),
    figure_forms: Sequence[str] = ("svg",),
) -> list[Path]:
    """Write the tables and figures of an experiment into `folder`; return the files.

    Parameters
    ----------
    table_forms
        Of "csv", which holds plain numbers, and "latex", which holds the tables of the report.
    figure_forms
        Of "svg", "pdf" and "png". The data of each figure are written beside it as CSV.
    """
    written = list[Path]()

    def write(name: str, contents: str | bytes) -> None:
        write_whole(folder / name, contents, "an exported file")
        written.append(folder / name)

    if "csv" in table_forms:
        write("trials.csv", to_csv(study.frame))
        write("comparison.csv", to_csv(tables.comparison_frame(study.compared)))
        write("claims.csv", to_csv(tables.claims_frame(study.judged)))
    if "latex" in table_forms:
        for name, text in latex_tables(study).items():
            write(f"{name}.tex", text)
    for drawing in figures.draw(study) if figure_forms else ():
        write(f"figures/{drawing.name}.csv", to_csv(drawing.data))
        for form in figure_forms:
            write(f"figures/{drawing.name}.{form}", style.to_file(drawing.figure, form))
    return written


def latex_tables(study: Study) -> dict[str, str]:
    """Return the tables of the report as LaTeX, by name."""
    found = {}
    if study.judged:
        claims = tables.claims_frame(study.judged)[["claim", "found", "verdict", "reason"]]
        claims = claims.set_index("claim")
        found["claims"] = tables.to_latex(claims, "claims", "Claims and verdicts.")
    found["glance"] = tables.to_latex(
        tables.glance(study).T.rename_axis("metric"), "glance", CAPTION
    )
    for condition, name in style.slugs(study.conditions).items():
        suffix = f"-{name}" if name else ""
        table, _ = tables.metrics(study, condition)
        found[f"metrics{suffix}"] = tables.to_latex(table, f"metrics{suffix}", CAPTION)
        compared = tables.comparison(study, condition)
        if len(compared):
            caption = f"Exploratory comparison, {condition}; in brackets 95% intervals."
            found[f"comparison{suffix}"] = tables.to_latex(compared, f"comparison{suffix}", caption)
    return found


def to_csv(frame: pd.DataFrame) -> str:
    """Return a table as CSV without its index."""
    return str(frame.to_csv(index=False, lineterminator="\n"))
