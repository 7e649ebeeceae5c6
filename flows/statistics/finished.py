"""Reader of the finished trials of an experiment, each with the effect of its faults."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from dps.errors import ConfigurationError
from dps.events import Event
from flows.config.errors import suggest
from flows.config.trials import Trial
from flows.metrics.effects import Effects, effects
from flows.metrics.outcome import Outcome, outcome
from flows.metrics.prices import Prices
from flows.metrics.trial import Trial as Recorded
from flows.metrics.trial import status
from flows.quoting import quoted, shown
from flows.records.record import (
    EVENTS_FILE,
    Record,
    RecordDamaged,
    event_files,
    labels_of,
    read_trial,
)
from flows.statistics.caveats import NO_CONTROL
from flows.statistics.groups import place

RESULTS = "results"
REPORT = "report.html"


@dataclass(frozen=True, slots=True)
class Finished:
    """One trial, with its record."""

    events_file: Path
    record: Record
    outcome: Outcome


# -- records ------------------------------------------------------------------------------------


def experiment_folder(experiment: str, here: Path) -> Path:
    """Return the folder with an experiment's records.

    Raises `ConfigurationError` if no trial of such an experiment is recorded in this working
    directory.
    """
    root, known = here / RESULTS, recorded_experiments(here)
    if experiment in known:
        return root / experiment
    if not known:
        raise ConfigurationError(
            f"nothing is recorded in {root}; run `dps run {shown(experiment)}` here first, or "
            "change to the directory in which it ran"
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
        return True  # damaged: a command for this very experiment reports that


def whole_record(
    trial: Trial, folder: Path, without: Collection[type[Event]] = ()
) -> Record | None:
    """Return the record of a trial in an experiment's folder, `without` events of some kinds.

    None unless it is whole, of this configuration, and not of a failed trial, which may succeed
    when it is run again.
    """
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


# -- outcomes -----------------------------------------------------------------------------------


def finished(events_file: Path, record: Record, prices: Prices) -> Finished:
    """Compute the metrics of one trial, whose record was read."""
    return Finished(events_file, record, outcome(record, prices, events_file.parent.name))


def read_finished(events_file: Path, prices: Prices) -> Finished:
    """Read one trial's record and compute its metrics."""
    return finished(events_file, read_trial(events_file), prices)


def read_experiment(
    folder: Path, prices: Prices, warn: Callable[[str], None] = lambda _: None
) -> list[Finished]:
    """Read all records of an experiment, in the order of its configuration.

    If that order was not stored, trials without faults come first, then the others, each by name.
    Damaged records are left out; `warn` is called for each of them.
    """
    return as_configured(read_whole(event_files(folder), prices, warn), labels_of(folder))


def as_configured(found: Iterable[Finished], labels: Mapping[str, Sequence[str]]) -> list[Finished]:
    """Return trials in the order of the configuration; `labels` are its labels by axis."""
    return sorted(found, key=lambda each: place(each.outcome, labels))


def read_whole(
    events_files: Iterable[Path], prices: Prices, warn: Callable[[str], None]
) -> list[Finished]:
    """Read records, with the effects of faults where the control is among them.

    Damaged ones are left out; `warn` is called for each of them.
    """
    outcomes = []
    for path in events_files:
        try:
            outcomes.append(read_finished(path, prices))
        except RecordDamaged as error:
            warn(damaged(path, error))
    return with_effects(outcomes, prices)


def damaged(events_file: Path, error: RecordDamaged) -> str:
    """Return the warning that a trial is left out because of what its record holds."""
    return f"{events_file.parent.name} is skipped, because its record is damaged: {error}"


# -- effects ------------------------------------------------------------------------------------


def with_effects(found: Sequence[Finished], prices: Prices) -> list[Finished]:
    """Return trials with the effects of their faults, each against its control among them.

    A trial has none where there is no such control, or either is not valid or was resumed, so that
    its record begins in the middle.
    """

    outcomes = [each.outcome for each in found]
    starts = (each.record.started for each in found)
    setups = [setup(started.settings if started else {}) for started in starts]

    def usable(index: int) -> bool:
        return outcomes[index].valid and outcomes[index].whole

    @cache  # a control may be that of many
    def trial_of(index: int) -> Recorded:
        return Recorded(found[index].record, prices)

    # Of several trials that differ only by the faults, the control is the first usable one by name.
    order = sorted(range(len(found)), key=lambda i: (not usable(i), outcomes[i].identity.trial))
    controls: dict[str, int] = {}
    for index in order:
        if not setups[index].plans_faults:
            controls.setdefault(setups[index].but_for_faults, index)
    known = list(outcomes)
    for index, each in enumerate(outcomes):
        if not each.valid or not setups[index].plans_faults:
            continue
        control = controls.get(setups[index].but_for_faults)
        if control is not None and usable(index) and usable(control):
            effect = effects(trial_of(index), trial_of(control))
        else:
            effect = Effects(lacking=_lacking(each, None if control is None else outcomes[control]))
        known[index] = replace(each, effects=effect)
    return [replace(each, outcome=new) for each, new in zip(found, known, strict=True)]


def _lacking(outcome: Outcome, control: Outcome | None) -> str:
    if not outcome.whole:
        return "it was resumed"
    if control is None:
        return NO_CONTROL
    status = "was resumed" if control.valid else f"is {control.status}"
    return f"its control {control.identity.trial} {status}"


# -- controls: the trials that are the same as others, but for the faults -------------------------
# The settings in their records determine whether trials are the same: the labels on an experiment's
# axes are only names.

# Settings without influence on measurements, in addition to the faults: when a trial fails, and for
# how long it waits for nodes or real time.
_NO_MATTER = ("faults", "time_limit")
_NO_MATTER_OF_CLUSTER = ("patience",)


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup of a trial, by which its control is found.

    Attributes
    ----------
    but_for_faults
        Digest of the experiment, the seed, all settings but the faults, and the number of
        concurrent trials, because these slow each other down. "": unknown from the record.
    plans_faults
        Whether its fault plan has any entry.
    """

    but_for_faults: str
    plans_faults: bool


def setup(settings: Mapping[str, Any]) -> Setup:
    """Return the setup of a trial from the settings at the start of its record.

    They may be damaged: a value that should be a mapping and is not is ignored.
    """
    config, circumstances = (
        section if isinstance(section := settings.get(key), dict) else {}
        for key in ("config", "circumstances")
    )
    if not config:
        return Setup("", False)
    kept = {key: value for key, value in config.items() if key not in _NO_MATTER}
    if isinstance(kept.get("cluster"), dict):
        cluster = kept["cluster"]
        kept["cluster"] = {k: v for k, v in cluster.items() if k not in _NO_MATTER_OF_CLUSTER}
    content = {
        "experiment": settings.get("experiment"),
        "seed": settings.get("seed"),
        "config": kept,
        "parallel": circumstances.get("parallel", 1),
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return Setup(digest, bool(config.get("faults")))
