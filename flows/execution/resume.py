"""Going on with a trial that was interrupted, from its checkpoints alone.

What the trial was is kept beside its checkpoints (`dps.protocol.storage.manifest`), so the path is
enough: also on another machine, and when the driver, the scheduler and every node are gone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dps.core.faults.plan import AtUpdates
from dps.errors import ConfigurationError, StoreUnavailable
from dps.protocol.storage.manifest import Saved, about, find_saved
from flows.analysis.finished import RESULTS
from flows.config.experiment import TrialConfig
from flows.config.trials import Trial
from flows.files import first_free, is_folder
from flows.records.record import EVENTS_FILE, read_record
from flows.records.settings import trial_from

CHECKPOINTS = "checkpoints"
BEFORE = "events.interrupted.jsonl"


def checkpoints_of(name: str, here: Path) -> str:
    """Return the path of the checkpoints of a trial that is named, or whose folder is given.

    Anything else is taken for the path of checkpoints itself, which may be on another machine.
    """
    for folder in (Path(name), here / RESULTS / name):
        if is_folder(folder / CHECKPOINTS):
            return str(folder / CHECKPOINTS)
    return name


def saved_in(path: str) -> Saved:
    """Return what there is to go on from in a path of checkpoints.

    Raises
    ------
    StoreUnavailable
        There is nothing; the message says what is expected.
    CheckpointCorrupt
        The description of what is there is damaged.
    """
    try:
        return find_saved(path)
    except StoreUnavailable as error:
        raise StoreUnavailable(
            f"{error}. Expected a trial that wrote checkpoints, as demo/checkpoint.kill.seed-0, "
            f"its folder in {RESULTS}/, or the path of its checkpoints"
        ) from error


def trial_of(saved: Saved, path: str) -> Trial:
    """Return the trial that checkpoints are from.

    Raises
    ------
    ConfigurationError
        They are of a parameter server that was no trial, or of a trial that cannot run or go on
        here.
    """
    kept: dict[str, Any] = about(saved.run)
    if "config" not in kept:
        raise ConfigurationError(
            f"{path}: these checkpoints are not of a trial; go on with ParameterServer.resume"
        )
    trial = trial_from(kept, path)
    if not can_go_on(trial.config):
        raise ConfigurationError(
            f"{path}: the moments of this trial's faults are not all given in updates, or its "
            "servers and workers come and go, so that nobody knows what of it is behind; run it "
            "again with dps run"
        )
    return trial


def can_go_on(config: TrialConfig) -> bool:
    """Whether it is known what is behind a trial that has applied so many updates."""
    timed = (fault.when for fault in config.build_faults())
    return not config.elastic and all(isinstance(when, AtUpdates) for when in timed)


def trial_folder(trial: Trial, path: str, here: Path) -> Path:
    """Where the trial is recorded: where it was before, if that is beside its checkpoints."""
    beside = Path(path).absolute().parent
    if (beside / EVENTS_FILE).exists():
        return beside
    return here / RESULTS / trial.experiment / trial.name


def must_not_have_ended(folder: Path) -> None:
    """Make sure that the record in a folder, if there is one, is of an interrupted trial.

    Raises
    ------
    ConfigurationError
        The trial has ended, well or badly, or the record cannot be read.
    """
    path = folder / EVENTS_FILE
    ended = read_record(path).ended if path.exists() else None
    if ended is not None:
        raise ConfigurationError(
            f"the trial that is recorded in {folder} was not interrupted, it ended already "
            f"({ended.status}); to run it again, delete that folder and use `dps run`"
        )


def keep_record(folder: Path) -> None:
    """Put the record of the interrupted part aside; what follows is recorded anew."""
    if not (folder / EVENTS_FILE).exists():
        return
    stem = Path(BEFORE).stem  # it may have been interrupted more than once
    kept = first_free(lambda n: folder / (BEFORE if n == 1 else f"{stem}-{n}.jsonl"))
    (folder / EVENTS_FILE).rename(kept)


def interrupted(trial: Trial, folder: Path) -> str | None:
    """Return the path from which a trial that did not end can go on; None: it starts again.

    One that failed did end: going on from its last checkpoint would give it another time limit, and
    leave the faults that it failed under out of its record.

    Raises
    ------
    CheckpointCorrupt
        There is something to go on from, and its description is damaged.
    """
    durability = trial.config.build_recovery().durability
    if not durability.writes_checkpoints or not can_go_on(trial.config) or _over(folder):
        return None
    path = durability.path or str((folder / CHECKPOINTS).absolute())
    try:
        saved = find_saved(path)
    except StoreUnavailable:
        return None
    same = about(saved.run).get("digest") == trial.digest
    return path if same and saved.updates else None


def _over(folder: Path) -> bool:
    """Whether the trial that is recorded in a folder has ended, or nobody can tell."""
    try:
        return (folder / EVENTS_FILE).exists() and read_record(
            folder / EVENTS_FILE
        ).ended is not None
    except ConfigurationError:
        return True
