"""`dps compare`: two runs side by side, their configurations first, then their figures.

A run is an experiment ("demo"), all trials of it whose names begin with the same labels
("demo/chain"), those of one combination with all its seeds ("demo/chain.kill"), or one trial
("demo/chain.kill.seed-0"). Two trials are shown figure by figure; where there are several seeds,
the differences are judged, seed by seed, under each combination of what labels are left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from dps.errors import ConfigurationError
from flows.analysis.comparison import Compared, Rows, compare_rows, read_comparison, rows_by
from flows.analysis.effects.controls import setup
from flows.analysis.finished import RESULTS, Finished, experiment_folder, read_whole
from flows.analysis.outcome import Outcome
from flows.analysis.prices import Prices
from flows.analysis.virtual_time import told
from flows.config.base import ComparisonSection
from flows.config.errors import suggest
from flows.config.trials import flat, trial_name
from flows.metrics import COLUMNS, NOT_APPLICABLE
from flows.metrics.score import ACCURACY
from flows.quoting import quoted, shown
from flows.records.record import event_files, read_start
from flows.report.terminal import figure_name, print_exploratory, signed

if TYPE_CHECKING:
    from rich.console import Console

# What tells trials of one run apart, or only names them.
NO_SETTINGS = ("experiment", "seed")
# What the heading of a trial's figures tells already.
TOLD_ABOVE = ("experiment", "trial", "strategy", "condition", "seed", "digest")
ALWAYS_SHOWN = ("updates_lost",)
SHOWN_LENGTH = 40


@dataclass(frozen=True, slots=True)
class Run:
    """The trials that a name stands for; `part` is what it says beside the experiment, or ""."""

    name: str
    part: str
    trials: tuple[Finished, ...]
    comparison: ComparisonSection


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting in which two runs differ, with its values in each."""

    key: str
    first: str
    second: str


def find_run(
    name: str, here: Path, prices: Prices, warn: Callable[[str], None] = lambda _: None
) -> Run:
    """Read the trials that a name stands for; `warn` is told of damaged ones, which are left out.

    Raises
    ------
    ConfigurationError
        Nothing of that name is recorded in this working directory, or nothing that is whole.
    """
    experiment, _, part = name.strip("/").partition("/")
    folder = experiment_folder(experiment, here)
    files = {path.parent.name: path for path in event_files(folder)}
    beginning = f"{part}." if part else ""
    chosen = [path for trial, path in files.items() if f"{trial}.".startswith(beginning)]
    if not chosen:
        known = [*dict.fromkeys(filter(None, map(_combination, files))), *files]
        raise ConfigurationError(
            f"{quoted(name)}: the experiment {experiment!r} in {here / RESULTS} has no trial "
            f"{quoted(part)}; "
            f"{suggest(part, known)}"
        )
    # The controls of trials with faults are read as well: effects are told against them.
    others = [] if all(map(_is_quiet, chosen)) else [p for p in files.values() if p not in chosen]
    controls = filter(_is_quiet, others)
    found = read_whole(sorted([*chosen, *controls]), prices, warn)
    trials = [each for each in found if each.events_file in chosen]
    if not trials:
        raise ConfigurationError(f"{name}: no record of it is whole; `dps run` runs it again")
    return Run(name, part, tuple(trials), read_comparison(folder))


def settings_that_differ(first: Run, second: Run) -> list[Setting]:
    """Return what the configurations, or the software, of two runs do not have in common."""
    mine, theirs = _settings(first), _settings(second)
    keys = dict.fromkeys([*mine, *theirs])
    return [
        Setting(shown(key), _shown(mine.get(key, ())), _shown(theirs.get(key, ())))
        for key in keys
        if mine.get(key, ()) != theirs.get(key, ())
    ]


def judged(first: Run, second: Run, rng: np.random.Generator) -> tuple[Compared, ...]:
    """Compare the second run with the first, by the metrics of the first.

    They are compared for every combination of labels, of those not named, that both have.

    Raises
    ------
    ConfigurationError
        They have no combination in common.
    """
    rows: Rows = {**_rows(first), **_rows(second)}
    conditions = [condition for condition, run in rows if run == first.name]
    shared = [condition for condition in conditions if (condition, second.name) in rows]
    if not shared:
        raise ConfigurationError(
            f"{first.name} and {second.name} have no labels in common under which both have a "
            "valid trial. Name the trials to compare, as in demo/chain.kill."
        )
    names = (first.name, second.name)
    return compare_rows(rows, shared, names, first.name, first.comparison, rng)


def print_side_by_side(first: Run, second: Run, rng: np.random.Generator, console: Console) -> None:
    """Print what differs in the configurations of two runs, then their figures.

    Raises
    ------
    ConfigurationError
        An experiment and a trial, twice the same, or experiments with nothing in common.
    """
    if first.name == second.name:
        raise ConfigurationError(f"{first.name} is named twice; name two different runs")
    if bool(first.part) != bool(second.part):
        raise ConfigurationError(
            f"{first.name} and {second.name}: one is an experiment, one is not. Name two "
            "experiments, or trials of each, as in demo/chain.kill."
        )
    console.print(_settings_table(first, second))
    if time := told([done.outcome.virtual for done in (*first.trials, *second.trials)]):
        console.print(Text(f"Time: {time}.", style="yellow"))
    console.print()
    for done in (*first.trials, *second.trials):
        if not done.outcome.valid:
            identity = done.outcome.identity
            line = f"{identity.experiment}/{identity.trial} is {done.outcome.status}"
            console.print(Text(f"{line}: {done.outcome.reason}", style="yellow"))
    if len(first.trials) == len(second.trials) == 1:
        outcomes = first.trials[0].outcome, second.trials[0].outcome
        console.print(figures_of_two((first.name, second.name), *outcomes))
    else:
        scores = {trial.outcome.score for trial in (*first.trials, *second.trials)}
        print_exploratory(
            judged(first, second, rng), console, scores.pop() if len(scores) == 1 else ACCURACY
        )


def figures_of_two(names: tuple[str, str], first: Outcome, second: Outcome) -> Table:
    """Return the figures of two trials and what became of them.

    What both lack, or is shown as 0 in both, is left out, but for what a reader looks for first.
    """
    mine, theirs = first.row(), second.row()
    table = _table("figure", *names, "difference", numbers=True)
    for column in COLUMNS:
        values = mine[column.key], theirs[column.key]
        texts = [column.text(value) for value in values]
        if column.key in TOLD_ABOVE or (column.key not in ALWAYS_SHOWN and _nothing(texts)):
            continue
        difference = ""
        if column.metric is not None and None not in values:
            difference = signed(column, values[1] - values[0])
        name = figure_name(first.score.of(column) if first.score == second.score else column)
        cells = (name, *texts, difference)
        table.add_row(*map(Text, cells))
    return table


# -- parts -------------------------------------------------------------------------------------


def _is_quiet(events_file: Path) -> bool:
    """Whether a trial has no faults, as far as its record says."""
    try:
        start = read_start(events_file)
    except ConfigurationError:
        return False
    return start is not None and not setup(start.settings).plans_faults


def _settings(run: Run) -> dict[str, tuple[str, ...]]:
    """The values that each setting has in the trials of a run, each once."""
    found: dict[str, dict[str, None]] = {}
    for done in run.trials:
        started = done.record.started
        versions: Mapping[str, Any] = started.versions if started else {}
        config = {k: v for k, v in done.record.config.items() if k not in NO_SETTINGS}
        for key, value in {**flat(config), **flat(versions, "versions.")}.items():
            found.setdefault(key, {})[_text(value)] = None
    return {key: tuple(sorted(values)) for key, values in found.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _nothing(texts: Iterable[str]) -> bool:
    """Whether each text is a zero of any precision, or stands for a figure that is not there."""
    return all(not text.strip("0.") or text == NOT_APPLICABLE for text in texts)


def _shown(values: Iterable[str]) -> str:
    text = " | ".join(values) or NOT_APPLICABLE
    return shown(text if len(text) <= SHOWN_LENGTH else f"{text[: SHOWN_LENGTH - 1]}…")


def _rows(run: Run) -> Rows:
    def place(outcome: Outcome) -> tuple[str, str]:
        return " · ".join(_labels_left(outcome, run.part)), run.name

    return rows_by((done.outcome for done in run.trials), place)


def _labels_left(outcome: Outcome, part: str) -> list[str]:
    """The labels of a trial that a part of its name does not say."""
    labels = list(outcome.identity.labels.items())
    for said in range(len(labels)):
        if _combination(trial_name(dict(labels[:said]), seed=0)) == part:
            return [label for _, label in labels[said:]]
    return []


def _combination(trial: str) -> str:
    """The name of a trial without its seed: its labels."""
    return trial.rpartition(".seed-")[0]


def _settings_table(first: Run, second: Run) -> Table | Text:
    settings = settings_that_differ(first, second)
    if not settings:
        return Text("Their configurations are the same, but for names and seeds.")
    table = _table("setting", first.name, second.name)
    for setting in settings:
        table.add_row(Text(setting.key), Text(setting.first), Text(setting.second))
    return table


def _table(first: str, *others: str, numbers: bool = False) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(Text(first))
    for heading in others:
        table.add_column(Text(heading), justify="right" if numbers else "left", overflow="fold")
    return table
