"""The commands that show what is recorded: `dps results`, and `dps compare` of several runs.

Both write for people, or means, intervals and verdicts in a form for other programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import completion
from flows.cli.console import console as _console
from flows.cli.console import warn as _warn
from flows.cli.documents import AsJson
from flows.cli.documents import json_output as _json_output

if TYPE_CHECKING:
    from flows.analysis.outcome import Outcome
    from flows.report.compare import Form

app = typer.Typer()


class Format(StrEnum):
    """How `dps results` and `dps compare` write."""

    table = "table"
    csv = "csv"
    json = "json"
    latex = "latex"


def _format(text: str) -> Format:
    try:
        return Format(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(Format)}") from None


FormatOption = Annotated[
    Format,
    typer.Option("--format", "-f", help="How to write.", parser=_format, metavar="|".join(Format)),
]
Experiment = Annotated[
    str,
    typer.Argument(
        help="The name of an experiment recorded here.", autocompletion=completion.experiments
    ),
]
Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...",
        help="Experiments, or trials of them: demo, demo/chain, demo/chain.kill, "
        "demo/chain.kill.seed-0; those of another directory by their path: "
        "../before/results/demo. The first is what the others are compared with.",
        autocompletion=completion.runs,
    ),
]


@app.command()
def results(
    experiment: Experiment,
    format: FormatOption = Format.table,
    summary: Annotated[
        bool,
        typer.Option(
            "--summary",
            help="As csv and json: not every trial, but means, intervals, differences and "
            "verdicts. As latex, it is always these.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the figures of every recorded trial of an experiment, and what they show."""
    from numpy.random import default_rng

    from flows.analysis.comparison import compared, read_comparison
    from flows.analysis.finished import (
        experiment_folder,
        print_remedies,
        print_trials,
        read_experiment,
        to_csv,
        to_json,
    )
    from flows.analysis.prices import load_prices
    from flows.analysis.statistics.claims import judge, read_claims
    from flows.cli import documents
    from flows.monitor.status import as_it_stands, under_way
    from flows.report.claims import print_claims
    from flows.report.terminal import print_exploratory

    folder = experiment_folder(experiment, Path.cwd())
    recorded = read_experiment(folder, load_prices(), _warn)
    running = {standing.trial for standing in under_way(folder, recorded)}
    outcomes = [as_it_stands(done.outcome, running) for done in recorded]
    if not as_json and (format is Format.latex or (summary and format is not Format.table)):
        print(_summary(experiment, folder, outcomes, format), end="")
        return
    if format is not Format.table and not as_json:
        print(to_json(outcomes) if format is Format.json else to_csv(outcomes).rstrip("\n"))
        return
    judged = judge(outcomes, read_claims(folder), default_rng(0))
    rows = compared(outcomes, read_comparison(folder), default_rng(0))
    if as_json:
        with _json_output(as_json) as out:
            out.write(documents.results(experiment, outcomes, judged, rows))
        return
    console = _console()
    print_claims(judged, console)
    console.print()
    print_trials(outcomes, console)
    print_remedies(folder, outcomes, console)
    print_exploratory(rows, console, *(each.score for each in outcomes[:1]))


def _summary(experiment: str, folder: Path, outcomes: Sequence[Outcome], format: Format) -> str:
    """What an experiment shows, in a form for other programs: claims, means, differences."""
    from numpy.random import default_rng

    from flows.analysis.comparison import compared, read_comparison
    from flows.analysis.statistics.claims import judge, read_claims
    from flows.report.export import exported, to_csv, to_json
    from flows.report.latex import NEEDED, latex_tables

    comparison, claims = read_comparison(folder), read_claims(folder)
    if format is Format.latex:
        tables = latex_tables(outcomes, comparison, claims)
        return "\n".join([NEEDED.rstrip(), *(table.latex() for table in tables)])
    rows = exported(
        compared(outcomes, comparison, default_rng(0)),
        judge(outcomes, claims, default_rng(0)),
        *(each.score for each in outcomes[:1]),
    )
    return to_csv(rows) if format is Format.csv else f"{to_json(rows, [experiment])}\n"


@app.command()
def compare(
    runs: Runs,
    format: FormatOption = Format.table,
    as_json: AsJson = False,
) -> None:
    """Show recorded runs side by side: what changed in settings and versions, then figures."""
    from numpy.random import default_rng

    from flows.analysis.prices import load_prices
    from flows.cli import documents
    from flows.report.compare import (
        check_comparable,
        find_run,
        judged,
        print_side_by_side,
        write_side_by_side,
    )

    forms: dict[Format, Form] = {
        Format.csv: "csv",
        Format.json: "json",
        Format.latex: "latex",
    }
    prices = load_prices()
    found = [find_run(name, Path.cwd(), prices, _warn) for name in runs]
    with _json_output(as_json) as out:
        if out.wanted:
            check_comparable(found)
            alone = all(len(run.trials) == 1 for run in found)
            rows = () if alone else judged(found, default_rng(0))
            out.write(documents.compare(found, rows))
        elif format is Format.table:
            print_side_by_side(found, default_rng(0), _console())
        else:
            print(write_side_by_side(found, default_rng(0), forms[format]), end="")
