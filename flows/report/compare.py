"""`dps compare`: runs side by side, what changed between them first, then their figures.

A run is an experiment ("demo"), all trials of it whose names begin with the same labels
("demo/chain"), or that have a label on another axis ("demo/kill"), those of one combination with
all its seeds ("demo/chain.kill"), or one trial ("demo/chain.kill.seed-0"); one of another working
directory, such as that of another version of dps, is named by its path ("../before/results/demo").
Two trials are shown figure by figure; else the differences from the first run are judged, seed by
seed, under each combination of what labels are left.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.table import Table
from rich.text import Text

from dps.errors import ConfigurationError
from flows.analysis.comparison import Compared, Rows, compare_rows, read_comparison, rows_by
from flows.analysis.effects.controls import setup
from flows.analysis.finished import Finished, as_configured, experiment_folder, read_whole
from flows.analysis.outcome import Outcome, labels_told
from flows.analysis.prices import Prices
from flows.analysis.virtual_time import told
from flows.config.base import ComparisonSection
from flows.config.errors import suggest
from flows.config.trials import flat, trial_name
from flows.files import is_file, is_folder
from flows.metrics import COLUMNS, NOT_APPLICABLE
from flows.metrics.score import ACCURACY, Score
from flows.quoting import quoted, shown
from flows.records.record import EVENTS_FILE, event_files, labels_of, read_start
from flows.report.export import exported, to_csv, to_json
from flows.report.latex import NEEDED, run_tables
from flows.report.terminal import figure_name, print_exploratory, signed

if TYPE_CHECKING:
    from rich.console import Console

# What tells trials of one run apart, or only names them.
NO_SETTINGS = ("experiment", "seed")
VERSIONS = "versions."
PATHS = ("/", "./", "../", "~")  # how the name of a run begins that is a path
# What the heading of a trial's figures tells already.
TOLD_ABOVE = ("experiment", "trial", "strategy", "condition", "seed", "digest")
ALWAYS_SHOWN = ("updates_lost",)
SHOWN_LENGTH = 40
PAIR = 2


Form = Literal["csv", "json", "latex"]


@dataclass(frozen=True, slots=True)
class Run:
    """The trials that a name stands for; `part` is what it says beside the experiment, or ""."""

    name: str
    part: str
    trials: tuple[Finished, ...]
    comparison: ComparisonSection


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting, or the version of a library, in which runs differ, with its values in each.

    A run has several values where its trials differ, and none where it has no such setting.
    """

    key: str
    values: tuple[tuple[str, ...], ...]

    @property
    def software(self) -> bool:
        """Whether it is the version of dps or a library."""
        return self.key.startswith(VERSIONS)


def find_run(
    name: str, here: Path, prices: Prices, warn: Callable[[str], None] = lambda _: None
) -> Run:
    """Read the trials that a name stands for; `warn` is told of damaged ones, which are left out.

    Raises
    ------
    ConfigurationError
        Nothing of that name is recorded in this working directory, or nothing that is whole.
    """
    folder, part = _folder_and_part(name, here)
    files = {path.parent.name: path for path in event_files(folder)}
    beginning = f"{part}." if part else ""
    chosen = [path for trial, path in files.items() if f"{trial}.".startswith(beginning)]
    chosen = chosen or [path for path in files.values() if part in _said_of_labels(path)]
    if not chosen:
        known = [*dict.fromkeys(filter(None, map(_combination, files))), *files]
        raise ConfigurationError(
            f"{quoted(name)}: the experiment {folder.name!r} in {folder.parent} has no trial "
            f"{quoted(part)}; "
            f"{suggest(part, known)}"
        )
    # The controls of trials with faults are read as well: effects are told against them.
    others = [] if all(map(_is_quiet, chosen)) else [p for p in files.values() if p not in chosen]
    controls = filter(_is_quiet, others)
    found = read_whole(sorted([*chosen, *controls]), prices, warn)
    trials = as_configured(
        (each for each in found if each.events_file in chosen), labels_of(folder)
    )
    if not trials:
        raise ConfigurationError(f"{name}: no record of it is whole; `dps run` runs it again")
    return Run(name, part, tuple(trials), read_comparison(folder))


def _folder_and_part(name: str, here: Path) -> tuple[Path, str]:
    """Return the folder of the experiment that a run is of, and what its name says beside that."""
    if not name.startswith(PATHS):
        experiment, _, part = name.strip("/").partition("/")
        return experiment_folder(experiment, here), part
    path = (here / os.path.expanduser(name)).absolute()
    folders = (each for each in (path, *path.parents) if is_file(each / EVENTS_FILE))
    trial = next(folders, None)
    if trial is not None:
        return trial.parent, trial.name
    for folder, part in ((path, ""), (path.parent, path.name)):
        if is_folder(folder) and any(event_files(folder)):
            return folder, part
    raise ConfigurationError(
        f"{quoted(name)}: expected the folder of an experiment with records of its trials, as in "
        "../before/results/demo, with labels of trials behind it or without"
    )


def settings_that_differ(*runs: Run) -> list[Setting]:
    """Return what the configurations, or the software, of runs do not have in common."""
    each = [_settings(run) for run in runs]
    keys = dict.fromkeys(key for settings in each for key in settings)
    found = {key: tuple(settings.get(key, ()) for settings in each) for key in keys}
    return [Setting(key, values) for key, values in found.items() if len(set(values)) > 1]


def judged(runs: Sequence[Run], rng: np.random.Generator) -> tuple[Compared, ...]:
    """Compare the other runs with the first, by the metrics of the first.

    They are compared for every combination of labels, of those not named, that all have.

    Raises
    ------
    ConfigurationError
        They have no combination in common.
    """
    first, names = runs[0], tuple(run.name for run in runs)
    rows: Rows = {at: trials for run in runs for at, trials in _rows(run).items()}
    conditions = [condition for condition, run in rows if run == first.name]
    shared = [
        condition for condition in conditions if all((condition, name) in rows for name in names)
    ]
    if not shared:
        raise ConfigurationError(
            f"{' and '.join(names)} have no labels in common under which "
            f"{'both' if len(runs) == PAIR else 'all'} have a "
            "valid trial. Name the trials to compare, as in demo/chain.kill."
        )
    return compare_rows(rows, shared, names, first.name, first.comparison, rng)


def check_comparable(runs: Sequence[Run]) -> None:
    """Check that runs can be set side by side.

    Raises
    ------
    ConfigurationError
        There is only one, or twice the same, or an experiment and a trial.
    """
    first, *others = runs
    if not others:
        raise ConfigurationError(
            f"{first.name} alone: name two runs or more. The strategies of one experiment are "
            f"compared by: dps results {first.name.partition('/')[0]}"
        )
    for number, run in enumerate(runs):
        if any(run.name == before.name for before in runs[:number]):
            raise ConfigurationError(f"{run.name} is named twice; name different runs")
        if bool(first.part) != bool(run.part):
            raise ConfigurationError(
                f"{first.name} and {run.name}: one is an experiment, one is not. Name "
                "experiments, or trials of each, as in demo/chain.kill."
            )


def print_side_by_side(runs: Sequence[Run], rng: np.random.Generator, console: Console) -> None:
    """Print what changed between runs, then their figures.

    Raises
    ------
    ConfigurationError
        They cannot be set side by side, or are experiments with nothing in common.
    """
    check_comparable(runs)
    _print_settings(runs, console)
    every = [done for run in runs for done in run.trials]
    if time := told([done.outcome.virtual for done in every]):
        console.print(Text(f"Time: {time}.", style="yellow"))
    console.print()
    for done in every:
        if not done.outcome.valid:
            identity = done.outcome.identity
            line = f"{identity.experiment}/{identity.trial} is {done.outcome.status}"
            console.print(Text(f"{line}: {done.outcome.reason}", style="yellow"))
    if len(every) == len(runs) == PAIR:
        first, second = runs
        outcomes = first.trials[0].outcome, second.trials[0].outcome
        console.print(figures_of_two((first.name, second.name), *outcomes))
    else:
        print_exploratory(judged(runs, rng), console, _score(runs))


def write_side_by_side(runs: Sequence[Run], rng: np.random.Generator, form: Form) -> str:
    """Return the comparison of runs as text in a form for other programs.

    Raises
    ------
    ConfigurationError
        They cannot be set side by side, or are experiments with nothing in common.
    """
    check_comparable(runs)
    compared, names = judged(runs, rng), [run.name for run in runs]
    if form == "latex":
        return "\n".join(
            [NEEDED.rstrip(), *(each.latex() for each in run_tables(compared, _score(runs)))]
        )
    rows = exported(compared, score=_score_of_all(runs))
    if form == "csv":
        return to_csv(rows)
    settings = [
        {"setting": each.key, "values": each.values} for each in settings_that_differ(*runs)
    ]
    return f"{to_json(rows, names, settings)}\n"


def _score(runs: Sequence[Run]) -> Score:
    """What all runs are scored by; accuracy stands for scores that differ."""
    return _score_of_all(runs) or ACCURACY


def _score_of_all(runs: Sequence[Run]) -> Score | None:
    """What all runs are scored by; None where scores differ."""
    scores = {done.outcome.score for run in runs for done in run.trials}
    return scores.pop() if len(scores) == 1 else None


def figures_of_two(names: tuple[str, str], first: Outcome, second: Outcome) -> Table:
    """Return the figures of two trials and what became of them.

    What both lack, or is shown as 0 in both, is left out, but for what a reader looks for first.
    """
    mine, theirs = first.row(), second.row()
    table = _table("figure", *names, "difference", numbers=True)
    for column in COLUMNS:
        if first.score == second.score and column.key in first.score.same_as:
            continue
        values = mine[column.key], theirs[column.key]
        if first.score == second.score:
            column = first.score.of(column)
        texts = [column.text(value) for value in values]
        if column.key in TOLD_ABOVE or (column.key not in ALWAYS_SHOWN and _nothing(texts)):
            continue
        difference = ""
        if column.metric is not None and None not in values:
            difference = signed(column, values[1] - values[0])
        cells = (figure_name(column), *texts, difference)
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


def _said_of_labels(events_file: Path) -> list[str]:
    """What each label of a trial is in its name, as far as its record says."""
    try:
        start = read_start(events_file)
    except ConfigurationError:
        return []
    labels = start.settings.get("labels") if start is not None else None
    pairs = labels.items() if isinstance(labels, dict) else ()
    return [_combination(trial_name({axis: str(label)}, seed=0)) for axis, label in pairs]


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
    def at(outcome: Outcome) -> tuple[str, str]:
        return labels_told(_labels_left(outcome, run.part)), run.name

    return rows_by((done.outcome for done in run.trials), at)


def _labels_left(outcome: Outcome, part: str) -> dict[str, str]:
    """The labels of a trial that a part of its name does not say."""
    labels = list(outcome.identity.labels.items())
    alone = [_combination(trial_name(dict([label]), seed=0)) for label in labels]
    if part in alone[1:]:  # on another axis than the first
        said = alone.index(part)
        return dict((*labels[:said], *labels[said + 1 :]))
    for said in range(len(labels)):
        if _combination(trial_name(dict(labels[:said]), seed=0)) == part:
            return dict(labels[said:])
    return {}


def _combination(trial: str) -> str:
    """The name of a trial without its seed: its labels."""
    return trial.rpartition(".seed-")[0]


def _print_settings(runs: Sequence[Run], console: Console) -> None:
    """Print which settings differ, then which versions of dps and libraries."""
    settings = settings_that_differ(*runs)
    names = [run.name for run in runs]
    for heading, found in (
        ("setting", [each for each in settings if not each.software]),
        ("software", [each for each in settings if each.software]),
    ):
        if not found:
            same = {
                "setting": "Their configurations are the same, but for names and seeds.",
                "software": "They ran with the same versions of dps and of all libraries.",
            }
            console.print(Text(same[heading]))
            continue
        table = _table(heading, *names)
        for each in found:
            key = shown(each.key.removeprefix(VERSIONS))
            table.add_row(*map(Text, (key, *map(_shown, each.values))))
        console.print(table)


def _table(first: str, *others: str, numbers: bool = False) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(Text(first))
    for heading in others:
        table.add_column(Text(heading), justify="right" if numbers else "left", overflow="fold")
    return table
