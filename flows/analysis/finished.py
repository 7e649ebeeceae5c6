"""How finished trials are read back and shown: on the terminal, as CSV, as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.table import Table
from rich.text import Text

from dps.errors import ConfigurationError, RecordDamaged
from dps.events import Event
from flows.analysis.effects.controls import Setup, controls, setup
from flows.analysis.effects.course import Course, course
from flows.analysis.effects.difference import Effects, effects
from flows.analysis.groups import Group, place, ranked, summarize
from flows.analysis.left_out import NO_CONTROL, remedies_in, short_of_target, without_effect
from flows.analysis.outcome import Outcome, outcome, status
from flows.analysis.prices import Prices
from flows.analysis.quiet import unquiet
from flows.analysis.transports import described
from flows.analysis.virtual_time import told
from flows.config.errors import suggest
from flows.metrics import BY_KEY, NOT_APPLICABLE
from flows.metrics.score import ACCURACY, Score
from flows.quoting import quoted, shown
from flows.records.record import (
    EARLIER,
    EVENTS_FILE,
    Record,
    event_files,
    labels_of,
    read_trial,
)

if TYPE_CHECKING:
    from rich.console import Console

RESULTS = "results"
REPORT = "report.html"
WIDE_ENOUGH_FOR_ONE_TABLE = 118


class Identified(Protocol):
    """What a record is found by: the trial's name, and the digest of all that it depends on."""

    @property
    def name(self) -> str:
        """The trial's name."""
        ...

    @property
    def digest(self) -> str:
        """Digest of all that the trial's results depend on."""
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """One trial as its record tells it."""

    events_file: Path
    record: Record
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Figure:
    """A column of the comparison: one figure, or several in one cell."""

    heading: str
    keys: tuple[str, ...]
    between: str = ""

    def text(self, group: Group) -> str:
        """Return the means over the trials of a group."""
        spreads = [(key, group.spread(key)) for key in self.keys]
        if not any(spread for _, spread in spreads):
            return NOT_APPLICABLE
        score = group.trials[0].score
        means = [score.of(BY_KEY[key]).text(spread and spread.mean) for key, spread in spreads]
        return self.between.join(means)

    def is_known_of(self, groups: Iterable[Group]) -> bool:
        """Whether there is something to tell; bytes of which nobody has any were not measured."""
        if any(BY_KEY[key].unit != "MB" for key in self.keys):
            return True
        spreads = [group.spread(key) for group in groups for key in self.keys]
        return any(spread is not None and spread.mean > 0 for spread in spreads)

    def heading_for(self, score: Score) -> str:
        """Return the heading for models with a score: without per cent where it is no share."""
        return _heading(self.heading, self.keys, score)


RECOVERY = (
    Figure("final\n%", ("accuracy_final",)),
    Figure(
        "effect, points\ntime/grads/money",
        ("effect_time_mean", "effect_gradients_mean", "effect_money_mean"),
        "/",
    ),
    Figure("down\ns", ("downtime_seconds",)),
    Figure("recov-\nery s", ("recovery_median_seconds",)),
    Figure("\nlost", ("updates_lost",)),
    Figure("re-\nplayed", ("updates_replayed",)),
    Figure("re-\nfused", ("updates_duplicates",)),
    Figure("stale\nm/p99/max", ("staleness_median", "staleness_p99", "staleness_max"), "/"),
)
USE = (
    Figure("CPU\ns", ("cpu_seconds_all",)),
    Figure("peak\nMB", ("peak_bytes_all",)),
    Figure("sent\nMB", ("sent_bytes_all",)),
    Figure("\nUSD", ("cost_usd",)),
)
LEGEND = (
    "Means over seeds. final: test accuracy. effect: accuracy minus that of the same seed without "
    "the faults, mean from the first fault on, over the same time, gradients and money. down: "
    "a shard was not served, over all faults. recovery: from a fault to the shard's next update, "
    "median of a trial's outages. lost: acked or buffered updates. refused: as duplicates. stale: "
    "versions, median/p99/max. The report says more."
)
PER_TRIAL = {
    "\ntrial": "trial",
    "\nstatus": "status",
    "final\n%": "accuracy_final",
    "effect\ntime": "effect_time_mean",
    "same\ngrads": "effect_gradients_mean",
    "same\nmoney": "effect_money_mean",
    "down\ns": "downtime_seconds",
    "\nlost": "updates_lost",
    "re-\nplayed": "updates_replayed",
    "re-\nfused": "updates_duplicates",
    "appl.\ntwice": "updates_applied_twice",
    "\nUSD": "cost_usd",
}


# -- reading -----------------------------------------------------------------------------------


def experiment_folder(experiment: str, here: Path) -> Path:
    """Return the folder with an experiment's records.

    Raises
    ------
    ConfigurationError
        No trial of such an experiment is recorded in this working directory.
    """
    root, known = here / RESULTS, recorded_experiments(here)
    if experiment in known:
        return root / experiment
    if not known:
        raise ConfigurationError(
            f"nothing is recorded in {root}; `dps run {shown(experiment)}` here first, or go to "
            "the directory in which it ran"
        )
    raise ConfigurationError(
        f"no experiment {quoted(experiment)} is recorded in {root}; {suggest(experiment, known)}"
    )


def recorded_experiments(here: Path) -> list[str]:
    """Return the names of the experiments that are recorded in a working directory."""
    return sorted(folder.name for folder in (here / RESULTS).glob("*") if _has_records(folder))


def _has_records(folder: Path) -> bool:
    try:
        return any(event_files(folder))
    except ConfigurationError:
        return True  # damaged: whoever asks for this very experiment is told


def is_recorded(trial: Identified, folder: Path) -> bool:
    """Tell whether an experiment's folder holds this trial, whole, under this configuration.

    A failed trial counts as missing: running it again may go better.
    """
    return whole_record(trial, folder) is not None


def whole_record(
    trial: Identified, folder: Path, without: Collection[type[Event]] = ()
) -> Record | None:
    """Return the record of a trial if it `is_recorded`, `without` events of some kinds."""
    events_file = folder / trial.name / EVENTS_FILE
    if not events_file.exists():
        return None
    try:
        record = read_trial(events_file, without)
    except ConfigurationError:  # of another version of dps, or damaged: replaced by a new run
        return None
    started = record.started
    if started is None or started.settings.get("digest") != trial.digest:
        return None
    return record if status(record)[0] in ("valid", "invalid") else None


def read_finished(events_file: Path, prices: Prices) -> Finished:
    """Read one trial's record and compute its figures."""
    return finished(events_file, read_trial(events_file), prices)


def read_experiment(
    folder: Path, prices: Prices, warn: Callable[[str], None] = lambda _: None
) -> list[Finished]:
    """Read all records of an experiment, in the order of its configuration.

    Where that was not noted, those without faults come first, else they are in the order of their
    names. Damaged ones are left out; `warn` is told of each of them.
    """
    return as_configured(read_whole(event_files(folder), prices, warn), labels_of(folder))


def as_configured(found: Iterable[Finished], labels: Mapping[str, Sequence[str]]) -> list[Finished]:
    """Return trials in the order of the configuration, whose `labels` are given by axis.

    So are their strategies then (`flows.analysis.groups.strategies`).
    """
    known = [replace(each, outcome=ranked(each.outcome, labels)) for each in found]
    return sorted(known, key=lambda each: place(each.outcome, labels))


def read_whole(
    events_files: Iterable[Path], prices: Prices, warn: Callable[[str], None]
) -> list[Finished]:
    """Read records; damaged ones are left out, and `warn` is told of each of them.

    The effects of faults are told where the control is among them.
    """
    found = []
    for path in events_files:
        try:
            found.append(finished(path, read_trial(path), prices))
        except RecordDamaged as error:
            warn(damaged(path, error))
    return with_effects(found, prices)


def read_outcomes(
    events_files: Iterable[Path], prices: Prices, warn: Callable[[str], None]
) -> list[Outcome]:
    """Read what came of trials, as `read_whole` does, and keep none of the records.

    An experiment of hundreds of trials has a gigabyte of them.
    """
    outcomes, setups, courses = list[Outcome](), list[Setup](), list[Course | None]()
    for path in events_files:
        try:
            done = finished(path, read_trial(path), prices)
        except RecordDamaged as error:
            warn(damaged(path, error))
            continue
        outcomes.append(done.outcome)
        setups.append(_setup(done))
        courses.append(course(done.record, prices))
    return _with_effects(outcomes, setups, courses.__getitem__)


def with_effects(found: Sequence[Finished], prices: Prices) -> list[Finished]:
    """Return trials with the effects of their faults, each against its control among them.

    A trial has none where there is no such control, or either is not valid or was resumed, so that
    its record begins in the middle.
    """

    @cache  # a control may be that of many
    def course_of(index: int) -> Course | None:
        return course(found[index].record, prices)

    outcomes = _with_effects([e.outcome for e in found], [_setup(e) for e in found], course_of)
    return [replace(each, outcome=new) for each, new in zip(found, outcomes, strict=True)]


def _setup(done: Finished) -> Setup:
    started = done.record.started
    return setup(started.settings if started else {})


def _with_effects(
    outcomes: Sequence[Outcome],
    setups: Sequence[Setup],
    course_of: Callable[[int], Course | None],
) -> list[Outcome]:
    """Trials with the effects of their faults; courses are asked for by index."""
    indices = {each.identity.trial: index for index, each in enumerate(outcomes)}
    every = {name: setups[index] for name, index in indices.items()}
    usable = {
        name: setup
        for name, setup in every.items()
        if outcomes[indices[name]].valid and outcomes[indices[name]].whole
    }
    control_of, any_control_of = controls(usable), controls(every)
    told = []
    for index, each in enumerate(outcomes):
        name = each.identity.trial
        if indices[name] == index and name in control_of:
            other = indices[control_of[name]]
            own = _effects(course_of(index), course_of(other), control_of[name])
            told.append(replace(each, effects=own))
        elif each.valid and setups[index].plans_faults:
            control = any_control_of.get(name)
            why = _lacking(each, None if control is None else outcomes[indices[control]])
            told.append(replace(each, effects=Effects(lacking=why)))
        else:
            told.append(each)
    return told


def _effects(own: Course | None, control: Course | None, name: str) -> Effects:
    if own is None or control is None:
        return Effects(lacking="nothing was evaluated in it or in its control")
    return effects(own, control, name)


def _lacking(outcome: Outcome, control: Outcome | None) -> str:
    """Why the effect of a valid trial's faults is not known."""
    if not outcome.whole:
        return "it was resumed"
    if control is None:
        return NO_CONTROL
    status = "was resumed" if control.valid else f"is {control.status}"
    return f"its control {control.identity.trial} {status}"


def damaged(events_file: Path, error: RecordDamaged) -> str:
    """Say that a trial is left out because of what its record holds."""
    return f"{events_file.parent.name} is left out, its record is damaged: {error}"


def finished(events_file: Path, record: Record, prices: Prices) -> Finished:
    """Compute the figures of one trial, whose record was read."""
    figures = outcome(record, prices)
    if record.started is None:  # its folder is all that tells whose record it is
        named = replace(figures.identity, trial=events_file.parent.name)
        figures = replace(figures, identity=named)
    return Finished(events_file, record, figures)


# -- showing -----------------------------------------------------------------------------------


def to_json(outcomes: Iterable[Outcome]) -> str:
    """Return a JSON list with one object per trial."""
    return json.dumps([o.row() for o in outcomes], indent=2, ensure_ascii=False)


def to_csv(outcomes: Iterable[Outcome]) -> str:
    """Return CSV with a header and one line per trial; empty where a figure does not apply."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(BY_KEY), lineterminator="\n")
    writer.writeheader()
    writer.writerows(o.row() for o in outcomes)
    return text.getvalue()


def to_table(outcomes: Iterable[Outcome]) -> Table:
    """Return a table with the main figures, one line per trial."""
    table = _table()
    found = list(outcomes)
    score = _score(found)
    for heading, key in PER_TRIAL.items():
        _add_column(table, _heading(heading, (key,), score), text=key in ("trial", "status"))
    for each in found:
        row = each.row()
        texts = (each.score.of(BY_KEY[key]).text(row[key]) for key in PER_TRIAL.values())
        table.add_row(*map(Text, texts))
    return table


def print_comparison(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print one line per strategy and condition, with means over the seeds."""
    groups = summarize(outcomes)
    if console.width >= WIDE_ENOUGH_FOR_ONE_TABLE:
        console.print(_comparison(groups, (*RECOVERY, *USE)))
    else:
        console.print(_comparison(groups, RECOVERY))
        console.print(_comparison(groups, USE))
    legend = " ".join(filter(None, [_score(outcomes).said(LEGEND), _score(outcomes).told]))
    console.print(Text(legend, style="dim"))
    print_time(outcomes, console)
    real = [outcome for outcome in outcomes if not outcome.virtual]
    if by := described(outcome.transports for outcome in real):
        console.print(Text(f"Arrays were sent by {by}.", style="dim"))
    print_left_out(outcomes, console)
    print_failed_before(outcomes, console)


def print_trials(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the main figures of each trial, what they are scored by, and which are left out."""
    console.print(to_table(outcomes))
    if said := _score(outcomes).told:
        console.print(Text(said, style="dim"))
    print_time(outcomes, console)
    print_left_out(outcomes, console)
    print_failed_before(outcomes, console)


def print_time(outcomes: Sequence[Outcome], console: Console) -> None:
    """Say what times and money are worth: of virtual time, and where the machine was not quiet."""
    if time := told([outcome.virtual for outcome in outcomes]):
        console.print(Text(f"Time: {time}.", style="yellow"))
    if busy := unquiet(outcomes):
        console.print(Text(f"{busy}.", style="yellow"))


def print_left_out(outcomes: Sequence[Outcome], console: Console) -> None:
    """Name the trials that enter no statistics, and those without an effect; say why."""
    for each in outcomes:
        if not each.valid:
            why = f": {each.reason}" if each.reason else ""
            line = f"{each.identity.trial} is {each.status} and left out{why}"
            console.print(Text(line, style="yellow"))
    for said in (short_of_target(outcomes), without_effect(outcomes)):
        if said:
            console.print(Text(said, style="yellow"))


def print_remedies(folder: Path, outcomes: Sequence[Outcome], console: Console) -> None:
    """Print which commands run the trials of an experiment that do not count."""
    for line in remedies_in(folder, outcomes):
        console.print(Text(line, style="yellow"), soft_wrap=True)


def failed_before(outcome: Outcome) -> str:
    """Say how often a trial failed before the attempt that its figures are of."""
    count = outcome.failed_before
    attempts = "1 attempt" if count == 1 else f"{count} attempts"
    return f"{outcome.identity.trial}: {attempts} before failed or invalid"


def print_failed_before(outcomes: Iterable[Outcome], console: Console) -> None:
    """Name the trials that failed before: what is left of them looks as if nothing had happened."""
    for each in outcomes:
        if each.failed_before:
            line = f"{failed_before(each)}; the records are kept in {EARLIER}/"
            console.print(Text(line, style="yellow"))


def _comparison(groups: Sequence[Group], figures: Sequence[Figure]) -> Table:
    table = _table()
    _add_column(table, "\nstrategy", text=True)
    _add_column(table, "\ncondition", text=True)
    score = next((each.score for group in groups for each in group.trials), ACCURACY)
    told = [figure for figure in figures if figure.is_known_of(groups)]
    for figure in told:
        _add_column(table, figure.heading_for(score))
    for group in groups:
        cells = [group.strategy, group.condition, *(figure.text(group) for figure in told)]
        table.add_row(*map(Text, cells))
    return table


def _score(outcomes: Sequence[Outcome]) -> Score:
    return outcomes[0].score if outcomes else ACCURACY


def _heading(heading: str, keys: Sequence[str], score: Score) -> str:
    """A heading in two lines, without the unit that figures of shares have."""
    if score.share or not any(BY_KEY[key].of_score for key in keys):
        return heading
    return heading.replace("%", "").replace(", points", "")


def _table() -> Table:
    return Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")


def _add_column(table: Table, heading: str, text: bool = False) -> None:
    table.add_column(Text(heading), justify="left" if text else "right", no_wrap=True)
