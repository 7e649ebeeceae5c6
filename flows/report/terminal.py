"""Terminal output on an experiment: claims, one table, trials, comparison and remarks."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from flows.report import claims as in_words
from flows.report import remarks, tables
from flows.report.study import Study
from flows.statistics import MIN_SEEDS
from flows.statistics.caveats import time_basis
from flows.statistics.claims import PlannedClaim, is_count
from flows.statistics.power import POWER, fewest_seeds

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

STYLES = {"good": "bold green", "bad": "bold red", "open": "bold yellow"}
EXPLORATORY = (
    "In brackets: 95% intervals. Intervals and p-values are uncorrected, "
    "so some exclude 0 by chance. Seeds needed: for a power of 80%."
)
MAX_ROWS = 16  # so that claims, table and remarks fit one screen
MAX_REMARKS = 3  # of losses, and of cautions
HEADING = 11  # letters, of the heading of a column of numbers
MAX_UNWRAPPED = 8  # columns of numbers that fit beside one another
ANY_WIDTH = 1000
MIN_FOLDED = 10  # letters, that labels are folded to


def print_study(study: Study, folder: Path | None, console: Console) -> None:
    """Print the results of a run on one screen: claims, the short table, and remarks."""
    print_claims(study, console)
    console.print()
    if len(study.valid):
        table = tables.glance(study, brief=True)
        if len(study.shown) == 1 and study.lead:
            console.print(Text(f"Means over seeds, condition {study.lead}:", style="dim"))
        print_table(table.iloc[:MAX_ROWS], console)
        if (more := len(table) - MAX_ROWS) > 0:
            console.print(Text(f"… and {more} more rows, which are in the report", style="dim"))
        if study.faulty:
            console.print(Text(tables.effect_defined(study), style="dim"))
    console.print()
    print_remarks(study, folder, console, MAX_REMARKS)


def print_claims(study: Study, console: Console) -> None:
    """Print each claim with its verdict."""
    if not study.judged:
        console.print(Text(in_words.NO_CLAIMS, style="dim"))
        return
    for number, each in enumerate(study.judged, 1):
        style = STYLES[in_words.TONES[each.decision.verdict]]
        line = Text(f"{number}. {in_words.title(each.claim, each.score)}: ")
        console.print(line.append(each.decision.verdict, style=style))
        because = ": ".join(filter(None, [in_words.reason(each), in_words.found(each)]))
        console.print(Text(f"   {because}"))
        for text in in_words.warnings(each):
            console.print(Text(f"   {text}", style="yellow"))


def print_results(study: Study, folder: Path, console: Console) -> None:
    """Print claims, every trial, the exploratory comparison and remarks."""
    print_claims(study, console)
    console.print()
    print_table(tables.trials(study, brief=True), console)
    for condition in dict.fromkeys(row.condition for row in study.compared):
        console.print(Text(f"\nExploratory{f', {condition}' * bool(condition)}", style="bold"))
        print_table(tables.comparison(study, condition), console)
    if study.compared:
        console.print(Text(EXPLORATORY, style="dim"))
    print_remarks(study, folder, console)


def print_remarks(
    study: Study, folder: Path | None, console: Console, most: int | None = None
) -> None:
    """Print the score of the models, losses, and limits of the numbers."""
    if study.score.note:
        console.print(Text(study.score.note, style="dim"))
    if time := time_basis([outcome.virtual for outcome in study.outcomes]):
        console.print(Text(f"Time: {time}.", style="dim"))
    for texts in remarks.losses(study), remarks.cautions(study, folder):
        for text in texts[:most]:  # a command in it stays in one line
            console.print(Text(text, style="yellow"), soft_wrap="dps " in text)
        if most is not None and len(texts) > most:
            console.print(Text(f"… and {len(texts) - most} more in the report", style="yellow"))


def print_table(table: pd.DataFrame, console: Console) -> None:
    """Print a DataFrame with its index; a label of the index is printed where it changes."""
    shown = plain_table([str(name or "") for name in table.index.names], list(table.columns))
    before: tuple[object, ...] = ()
    for index, row in zip(table.index, table.itertuples(index=False), strict=True):
        labels = index if isinstance(index, tuple) else (index,)
        repeated = labels[:-1] == before[:-1] and len(labels) > 1
        cells = ["" if repeated and place == 0 else label for place, label in enumerate(labels)]
        shown.add_row(*(Text(str(cell)) for cell in (*cells, *row)))
        before = labels
    unbounded = console.options.update(width=ANY_WIDTH)
    excess = console.measure(shown, options=unbounded).maximum - console.width
    if excess > 0:
        shown.padding = (0, 1, 0, 0)
        if max(len(str(label)) for label in table.index) >= excess + MIN_FOLDED:
            for column in shown.columns[: table.index.nlevels]:
                column.no_wrap = False
    console.print(shown)


def plain_table(left: Sequence[str], right: Sequence[str]) -> Table:
    """Return an empty table without lines, with columns of texts on the left and of numbers.

    Headings are wrapped. Numbers are not, unless there are too many columns; texts give way.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for place, name in enumerate(left):
        table.add_column(Text(name), no_wrap=place == len(left) - 1, overflow="fold")
    for name in map(str, right):
        lines = textwrap.wrap(name, HEADING, break_long_words=False, break_on_hyphens=False)
        heading = Text("\n".join(lines))
        if name == "reading":
            table.add_column(heading, overflow="fold")
        else:
            whole = len(right) <= MAX_UNWRAPPED
            table.add_column(heading, justify="right", no_wrap=whole, overflow="fold")
    return table


def print_plan(planned: Sequence[PlannedClaim], seeds: int, pilot: str, console: Console) -> None:
    """Print what a number of seeds can resolve of each claim, by the spread in a `pilot`."""
    if not planned:
        console.print(Text(in_words.NO_CLAIMS, style="dim"))
        return
    power = f"power, {seeds} seed{'s' * (seeds != 1)}"
    known = any(each.sd is not None for each in planned)
    table = plain_table(["claim"], ["sd", power, f"seeds for {POWER:.0%}"] if known else [])
    for number, each in enumerate(planned, 1):
        text = f"{number}. {in_words.title(each.claim, each.score)}"
        if each.claim.claim:
            text += f"\n   {in_words.statement(each.claim, each.score)}"
        if each.sd is None or each.power is None:
            cells = ["?", "?", "?"] if known else []
        else:
            (sd,), unit = in_words.amounts(each.score.of(each.claim.column), each.sd, finer=True)
            power = f"{each.power:.0%}" if each.power < 0.995 else ">99%"
            cells = [
                f"{sd} {unit}".rstrip(),
                power,
                f"{each.needed:,}" if each.needed else "over a million",
            ]
        table.add_row(*map(Text, (text, *cells)))
    console.print(table)
    console.print(Text(_plan_legend(planned, pilot), style="dim"))
    if seeds < MIN_SEEDS:
        console.print(f"A verdict takes at least {MIN_SEEDS} seeds; this experiment has {seeds}.")


def _plan_legend(planned: Sequence[PlannedClaim], pilot: str) -> str:
    seeds = [each.pilot_seeds for each in planned if each.sd is not None]
    if not seeds:
        return (
            "The power is unknown without a pilot: run a few seeds, or name recorded ones by "
            "--pilot, such as those of `dps run --virtual`."
        )
    level = f"5% / {len(planned)}" if len(planned) > 1 else "5%"
    text = (
        "Power: the probability that a claim is found to hold if the difference is the smallest "
        f"of interest (of an equivalence: if there is none), at the level of {level}."
    )
    if any(is_count(each.claim) for each in planned):
        text += f" Counts take at least {fewest_seeds(planned[0].level, exact=True)} seeds."
    return f"{text} sd: between trials of one seed, from {max(seeds)} seeds of {pilot}."
