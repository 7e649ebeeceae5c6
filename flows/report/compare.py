"""`dps compare`: runs side by side, what changed between them first, then their metrics.

A run is an experiment (demo), all trials of it with some labels (demo/chain, demo/kill,
demo/chain.kill) or one trial (demo/chain.kill.seed-0); one of another working directory is named by
its path (../before/results/demo). Others are compared with the first, seed by seed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from dps.errors import ConfigurationError
from flows.config.errors import suggest
from flows.config.settings import ComparisonSection
from flows.config.trials import flat, trial_name
from flows.metrics import BY_KEY, NOT_APPLICABLE
from flows.metrics.outcome import Outcome
from flows.metrics.prices import Prices
from flows.metrics.trial import labels_text
from flows.quoting import quoted, shown
from flows.records.record import EVENTS_FILE, event_files, labels_of, read_start
from flows.report import tables
from flows.report.study import NUMBERS, Study
from flows.report.terminal import print_remarks, print_table
from flows.statistics.comparison import Compared, Rows, compare_rows, read_questions, rows_by
from flows.statistics.finished import Finished, as_configured, experiment_folder, read_whole, setup

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

# Settings that only distinguish or name the trials of a run.
NO_SETTINGS = ("experiment", "seed")
VERSIONS = "versions."
PATHS = ("/", "./", "../", "~")  # how the name of a run begins that is a path
IN_THE_NAME = ("experiment", "trial", "strategy", "condition", "seed", "digest")
SHOWN_LENGTH = 40
PAIR = 2


@dataclass(frozen=True, slots=True)
class Run:
    """The trials that a name stands for; `part` is the name without the experiment, or ""."""

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


def find_run(
    name: str, here: Path, prices: Prices, warn: Callable[[str], None] = lambda _: None
) -> Run:
    """Read the trials that a name stands for; report damaged ones to `warn` and leave them out.

    Raises `ConfigurationError` if this working directory has no record of that name, or only
    damaged ones.
    """
    folder, part = _folder_and_part(name, here)
    starts = {path: _settings_of(path) for path in event_files(folder)}
    beginning = f"{part}." if part else ""
    chosen = [path for path in starts if f"{path.parent.name}.".startswith(beginning)]
    chosen = chosen or [  # by a label in the middle of the name
        path
        for path, settings in starts.items()
        if _labels_left(settings.get("labels", {}), part) is not None
    ]
    if not chosen:
        names = [path.parent.name for path in starts]
        known = [*dict.fromkeys(filter(None, map(_combination, names))), *names]
        raise ConfigurationError(
            f"{quoted(name)}: the experiment {folder.name!r} in {folder.parent} has no trial "
            f"{quoted(part)}; {suggest(part, known)}"
        )
    # The controls of trials with faults are read as well: effects are measured against them.
    controls = [
        path
        for path, settings in starts.items()
        if settings and path not in chosen and not setup(settings).plans_faults
    ]
    found = read_whole(sorted([*chosen, *controls]), prices, warn)
    trials = as_configured(
        (each for each in found if each.events_file in chosen), labels_of(folder)
    )
    if not trials:
        raise ConfigurationError(f"{name}: no record of it is whole; `dps run` runs it again")
    return Run(name, part, tuple(trials), read_questions(folder).comparison)


def _folder_and_part(name: str, here: Path) -> tuple[Path, str]:
    """Return the folder of a run's experiment, and the rest of the run's name."""
    if not name.startswith(PATHS):
        experiment, _, part = name.strip("/").partition("/")
        return experiment_folder(experiment, here), part
    path = (here / os.path.expanduser(name)).absolute()
    folders = (each for each in (path, *path.parents) if (each / EVENTS_FILE).is_file())
    trial = next(folders, None)
    if trial is not None:
        return trial.parent, trial.name
    for folder, part in ((path, ""), (path.parent, path.name)):
        if folder.is_dir() and any(event_files(folder)):
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


def compared(runs: Sequence[Run]) -> tuple[Compared, ...]:
    """Compare the other runs with the first, by the metrics of the first.

    They are compared for every combination of labels, of those not named, that all have.

    Raises `ConfigurationError` if they have no combination in common.
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
    return compare_rows(rows, shared, names, first.name, first.comparison, np.random.default_rng(0))


def check_comparable(runs: Sequence[Run]) -> None:
    """Check that runs can be set side by side.

    Raises `ConfigurationError` if there is only one run, or a run is given twice.
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


def document(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the comparison of runs as plain values; see docs/json.md."""
    alone = all(len(run.trials) == 1 for run in runs)
    return {
        "runs": [
            {"name": run.name, "trials": [done.outcome.row() for done in run.trials]}
            for run in runs
        ],
        "settings": settings_that_differ(*runs),
        "comparison": tables.comparison_frame(() if alone else compared(runs)),
    }


def print_side_by_side(runs: Sequence[Run], console: Console) -> None:
    """Print what changed between runs, then their metrics."""
    import pandas as pd

    differ = settings_that_differ(*runs)
    rows = [(each.key.removeprefix(VERSIONS), *map(_shown, each.values)) for each in differ]
    if rows:
        names = ["setting or version", *(run.name for run in runs)]
        print_table(pd.DataFrame(rows, columns=names).set_index(names[0]), console)
    else:
        console.print(Text("Their configurations and versions are the same, but for seeds."))
    console.print()
    every = [done.outcome for run in runs for done in run.trials]
    if len(every) == len(runs) == PAIR:
        names = [run.name for run in runs]
        print_table(two_trials((names[0], names[1]), *every), console)
    else:
        found, study = compared(runs), Study(tuple(every))
        for condition in dict.fromkeys(row.condition for row in found):
            console.print(Text(condition, style="bold"))
            print_table(tables.comparison(study, condition, found), console)
    print_remarks(Study(tuple(every)), None, console)


def two_trials(names: tuple[str, str], first: Outcome, second: Outcome) -> pd.DataFrame:
    """Return the metrics of two trials side by side, without those that both lack or have as 0."""
    import pandas as pd

    study, mine, theirs = Study((first, second)), first.row(), second.row()
    rows = {}
    for key in BY_KEY:
        values = mine[key], theirs[key]
        same = first.score == second.score and key == first.score.same_as
        if key in IN_THE_NAME or same or not (any(values) or key == "updates_lost"):
            continue
        difference = ""
        if key in NUMBERS and None not in values:
            change = values[1] - values[0]
            difference = f"{'+' if change > 0 else ''}{study.text(key, change)}"
        rows[study.label(key)] = (*(study.text(key, value) for value in values), difference)
    columns = [*names, "difference"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("metric")


def _settings_of(events_file: Path) -> Mapping[str, Any]:
    """Return the settings that the record of a trial begins with; none of a damaged one."""
    try:
        start = read_start(events_file)
    except ConfigurationError:
        return {}
    return {} if start is None else start.settings


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


def _shown(values: Iterable[str]) -> str:
    text = " | ".join(values) or NOT_APPLICABLE
    return shown(text if len(text) <= SHOWN_LENGTH else f"{text[: SHOWN_LENGTH - 1]}…")


def _rows(run: Run) -> Rows:
    def at(outcome: Outcome) -> tuple[str, str]:
        return labels_text(_labels_left(outcome.identity.labels, run.part) or {}), run.name

    return rows_by((done.outcome for done in run.trials), at)


def _labels_left(labels: Mapping[str, str], part: str) -> dict[str, str] | None:
    """Return the labels that part of a trial's name does not give; None: it is of other trials."""
    axes = list(labels)
    names = [_combination(trial_name({axis: str(labels[axis])}, seed=0)) for axis in axes]
    for first, last in combinations_with_replacement(range(len(axes) + 1), 2):
        if ".".join(names[first:last]) == part:
            return {axis: labels[axis] for axis in (*axes[:first], *axes[last:])}
    return None


def _combination(trial: str) -> str:
    """The name of a trial without its seed: its labels."""
    return trial.rpartition(".seed-")[0]
