"""An attempt at a trial: what a driver is asked to do, and what becomes of earlier attempts.

Nothing that was recorded under another configuration is lost: it is moved aside, and taken back
when its configuration is asked for again. Nor is that an attempt failed, or was invalid, which its
trial would hide when it goes well at last: its record is kept, and the next attempt tells how many
there were before.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from platform import python_version

from dps.errors import CheckpointCorrupt, ConfigurationError
from dps.events import TrialEnded, TrialResumed, TrialStarted
from flows.analysis.finished import Identified
from flows.config.trials import Trial
from flows.execution.resume import CHECKPOINTS, interrupted, keep_record
from flows.files import first_free
from flows.records.record import (
    EARLIER,
    EVENTS_FILE,
    FAILED_ATTEMPTS,
    EventWriter,
    Record,
    end_record,
    read_record,
    read_start,
    read_trial,
)
from flows.records.settings import settings

PACKAGES = ("dps", "dask", "distributed", "numpy", "mlflow", "scikit-learn", "safetensors")
FAILED = "failed"
RESUMED = "resumed"
DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a trial.

    Attributes
    ----------
    folder
        Where it is recorded.
    path
        Checkpoints to go on from; None: from the start of the trial.
    circumstances
        What the trial does not depend on but its times may: how many ran at once, and which in the
        order it was; and how many went wrong before. Recorded, and no part of the digest.
    """

    trial: Trial
    folder: Path
    path: str | None = None
    circumstances: Mapping[str, int] = field(default_factory=dict)


# Is told that the driver or scheduler of an attempt was lost, and how. Returns another attempt, to
# begin at once; or None: that one is over, and its record has an end.
Again = Callable[[Attempt, str], Attempt | None]


def prepare(
    trial: Trial,
    folder: Path,
    circumstances: Mapping[str, int],
    say: Callable[[str], None],
    *,
    resume: bool = True,
) -> Attempt:
    """Make the folder of a trial ready for an attempt: go on with the last one, or start again.

    What is in it must be of this trial: see `set_aside`. Without `resume`, it starts again.
    """
    path = _to_go_on_from(trial, folder, say) if resume else None
    if path is None:
        start_again(trial, folder, say, resume=resume)
    return _made_ready(trial, folder, path, circumstances)


def prepare_again(
    lost: Attempt, reason: str, say: Callable[[str], None], *, resume: bool = True
) -> Attempt:
    """Make the folder of a trial ready for another attempt: its driver or its scheduler was lost.

    As after an interruption it is gone on with, if it can be. Else that attempt has failed, for
    this reason: its record is kept and counted, and the trial starts again.
    """
    trial, folder = lost.trial, lost.folder
    path = _to_go_on_from(trial, folder, say) if resume else None
    if path is None:
        say(f"{trial.name}: {reason}; it starts again")
        end_unfinished(lost, reason)
        start_again(trial, folder, say, resume=resume)
    else:
        # From which update is told when it does: nodes of a deployment may write checkpoints yet.
        say(f"{trial.name}: {reason}; it goes on from its checkpoints")
    return _made_ready(trial, folder, path, lost.circumstances)


def start_again(
    trial: Identified, folder: Path, say: Callable[[str], None], *, resume: bool = False
) -> None:
    """Empty the folder of a trial for an attempt from its start, and keep one that is over.

    With `resume`, one that is not over would have been gone on with, but could not be.
    """
    if (ended := _ended(folder)) is not None:
        unwanted = not resume and _is_valid_but_resumed(ended)
        _keep(trial, folder, RESUMED if unwanted else FAILED, say)
    elif (folder / EVENTS_FILE).exists():
        why = "left nothing to go on from" if resume else "was interrupted"
        say(f"{trial.name}: an earlier attempt {why}: it starts again")
    # What an interrupted attempt left, checkpoints too, must not reach this one.
    shutil.rmtree(folder, ignore_errors=True)


def _made_ready(
    trial: Trial, folder: Path, path: str | None, circumstances: Mapping[str, int]
) -> Attempt:
    if path is not None:
        keep_record(folder)
    failed = {FAILED_ATTEMPTS: len(failures(trial, folder))}
    return Attempt(trial, folder, path, {**circumstances, **failed})


def _to_go_on_from(trial: Trial, folder: Path, say: Callable[[str], None]) -> str | None:
    """The path from which a trial that was interrupted can go on; None: it starts again."""
    try:
        return interrupted(trial, folder)
    except (CheckpointCorrupt, ConfigurationError) as error:
        say(f"{trial.name}: {error}")
        return None


def set_aside(trial: Identified, folder: Path, say: Callable[[str], None]) -> None:
    """Keep a record of this name that is damaged or of another configuration, in another folder."""
    path, damage = folder / EVENTS_FILE, None
    try:
        started = read_trial(path).started if path.exists() else None
        digest = str(started.settings.get("digest")) if started is not None else None
    except ConfigurationError as error:
        digest, damage = DAMAGED, error
    if digest in (None, trial.digest):
        return
    kept = first_free(lambda n: _earlier(folder, digest if n == 1 else f"{digest}.{n}"))
    kept.parent.mkdir(exist_ok=True)
    folder.rename(kept)
    if damage is None:
        say(f"{trial.name}: its record under another configuration is kept in {kept}")
    else:
        say(f"{trial.name}: its record is kept in {kept}, for it is damaged: {damage}")


def take_back(trial: Identified, folder: Path, say: Callable[[str], None]) -> None:
    """Use the record under this very configuration again, if there was one that was set aside."""
    kept = _earlier(folder, trial.digest)
    if kept.is_dir() and _digest(folder) != trial.digest:
        set_aside(trial, folder, say)
        shutil.rmtree(folder, ignore_errors=True)  # nothing that was recorded is in it
        kept.rename(folder)
        say(f"{trial.name}: its record under this configuration is back from {kept.parent}")


def _ended(folder: Path) -> Record | None:
    """The record in a folder, if it is of an attempt that is over, to be repeated as it is."""
    path = folder / EVENTS_FILE
    try:
        record = read_record(path) if path.exists() else Record(())
    except ConfigurationError:  # damaged
        return None
    return record if record.ended is not None else None


def _is_valid_but_resumed(record: Record) -> bool:
    """Whether nothing is wrong with an attempt but that its record begins in the middle."""
    valid = record.ended is not None and record.ended.status == "valid"
    return valid and bool(record.of(TrialResumed))


def _keep(trial: Identified, folder: Path, kind: str, say: Callable[[str], None]) -> None:
    """Keep the record of an attempt that is over, without its checkpoints: they may be large."""
    kept = first_free(
        lambda number: _earlier(folder, f"{trial.digest}.{kind}-{number}"),
        len(_attempts(trial, folder, kind)) + 1,
    )
    kept.parent.mkdir(exist_ok=True)
    folder.rename(kept)
    shutil.rmtree(kept / CHECKPOINTS, ignore_errors=True)
    say(f"{trial.name}: is tried again; the record of the attempt before is kept in {kept}")


def failures(trial: Identified, folder: Path) -> list[Path]:
    """Return the kept records of attempts at a trial, as it is configured, that went wrong."""
    return _attempts(trial, folder, FAILED)


def _attempts(trial: Identified, folder: Path, kind: str) -> list[Path]:
    return list((folder.parent / EARLIER).glob(f"{folder.name}.{trial.digest}.{kind}-*"))


def is_over(attempt: Attempt) -> bool:
    """Whether the record of an attempt has an end."""
    path = attempt.folder / EVENTS_FILE
    return path.exists() and read_record(path).ended is not None


def end_unfinished(attempt: Attempt, reason: str) -> None:
    """End the record of a trial whose driver cannot do it any more: the trial has failed."""
    path = attempt.folder / EVENTS_FILE
    record = read_record(path) if path.exists() else Record(())
    if record.ended is not None:
        return
    now = time.time()
    if not record.events:
        told = settings(attempt.trial, attempt.circumstances)
        with EventWriter(path) as write:
            write(TrialStarted(now, attempt.trial.name, told, versions()))
    end_record(path, TrialEnded(now, "failed", reason))


def versions(torch: bool = False, others: Mapping[str, str] | None = None) -> dict[str, str]:
    """The software that a trial ran on; `others` are what provides kinds of its configuration."""
    packages = (*PACKAGES, "torch") if torch else PACKAGES
    own = {name: version(name) for name in packages}
    return {"python": python_version(), **own, **(others or {})}


def _earlier(folder: Path, name: str) -> Path:
    return folder.parent / EARLIER / f"{folder.name}.{name}"


def _digest(folder: Path) -> str | None:
    """The digest of the trial that is recorded in a folder; None if none is."""
    path = folder / EVENTS_FILE
    try:
        started = read_start(path) if path.exists() else None
    except ConfigurationError:
        return DAMAGED
    return str(started.settings.get("digest")) if started is not None else None
