"""An attempt at a trial: the task of a driver, and the handling of earlier attempts.

Records of another configuration are moved aside, and restored when that configuration is requested
again. Failed and invalid attempts are kept as well, and the next attempt records their number. An
interrupted attempt resumes from its checkpoints if it has any; otherwise its trial restarts.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from dps.cluster.names import NodeSpec, resource_of
from dps.errors import CheckpointCorrupt, ConfigurationError, StoreUnavailable
from dps.faults import AtUpdates
from dps.recovery.manifest import find_saved
from flows.config import sections
from flows.config.experiment import TrialConfig
from flows.config.trials import Trial
from flows.files import first_free
from flows.records.events import TrialEnded, TrialResumed, TrialStarted
from flows.records.record import (
    EARLIER,
    EVENTS_FILE,
    FAILED_ATTEMPTS,
    EventWriter,
    Record,
    end_record,
    read_record,
    read_trial,
)
from flows.workloads import with_torch

CHECKPOINTS = "checkpoints"
INTERRUPTED = "events.interrupted.jsonl"
PACKAGES = ("dps", "dask", "distributed", "numpy", "mlflow", "scikit-learn", "safetensors")
# What nodes import before they are forked, so that each is up at once. Each process imports the
# command again by which all was started, and typer with that.
PRELOAD = ("dps.cluster.driver.parameter_server", "flows.execution.training", "typer")

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a trial.

    Attributes
    ----------
    folder
        Folder of its record.
    path
        Checkpoints to resume from; None: from the start of the trial.
    circumstances
        Conditions that may affect only the trial's times: the number of concurrent trials, its
        position in the order, and the number of failed attempts. Recorded, not in the digest.
    """

    trial: Trial
    folder: Path
    path: str | None = None
    circumstances: Mapping[str, int] = field(default_factory=dict)


# Called with an attempt that lost its driver or scheduler, and the reason. Returns another attempt,
# to start at once; or None: the lost attempt is over, and its record has an end.
Again = Callable[[Attempt, str], Attempt | None]


def prepare(
    trial: Trial,
    folder: Path,
    circumstances: Mapping[str, int],
    notify: Notify,
    *,
    resume: bool = True,
    lost: str = "",
) -> Attempt:
    """Prepare the folder of a trial for an attempt: resume the last one, or start again.

    The folder's contents must belong to this trial: see `set_aside`. `lost` is the reason why the
    last attempt is lost, if it was one of this run. If that cannot be resumed, it has failed for
    this reason: its record is kept and counted.
    """
    path = resumable(trial, folder, notify) if resume else None
    if path is not None:
        if lost:
            # From which update is logged when it does: nodes may write checkpoints yet.
            notify(f"{trial.name}: {lost}; it resumes from its checkpoints")
        keep_interrupted(folder)
    else:
        if lost:
            notify(f"{trial.name}: {lost}; it restarts")
            end_unfinished(Attempt(trial, folder, None, circumstances), lost)
        _start_again(trial, folder, notify, resume)
    failed = {FAILED_ATTEMPTS: len(_kept(trial, folder, "failed"))}
    return Attempt(trial, folder, path, {**circumstances, **failed})


def resumable(trial: Trial, folder: Path, notify: Notify) -> str | None:
    """Return the checkpoints from which an unfinished trial can continue; None: it starts again.

    A trial that failed has ended: from its last checkpoint it would have another time limit, and
    lack the faults under which it failed in its record. One that had applied all of its updates
    would have none left to record.
    """
    recovery = trial.config.recovery.build()
    if not recovery.durability.writes_checkpoints or not can_resume(trial.config):
        return None
    path = recovery.path or str((folder / CHECKPOINTS).absolute())
    try:
        if recorded(folder).ended is not None:
            return None
        saved = find_saved(path)
        same = json.loads(saved.run.about).get("digest") == trial.digest
    except StoreUnavailable:
        return None
    except (CheckpointCorrupt, ConfigurationError) as error:
        notify(f"{trial.name}: {error}")
        return None
    return path if same and 0 < saved.updates < trial.config.training.updates else None


def can_resume(config: TrialConfig) -> bool:
    """Return whether the number of applied updates determines which faults and changes are over."""
    timed = (fault.when for fault in config.fault_plan)
    return not config.elastic and all(isinstance(when, AtUpdates) for when in timed)


def keep_interrupted(folder: Path) -> None:
    """Keep the record of the interrupted part under another name, and begin a new record."""
    if (folder / EVENTS_FILE).exists():
        stem = Path(INTERRUPTED).stem  # it may have been interrupted more than once
        kept = first_free(lambda n: folder / (INTERRUPTED if n == 1 else f"{stem}-{n}.jsonl"))
        (folder / EVENTS_FILE).rename(kept)


def _start_again(trial: Trial, folder: Path, notify: Notify, resume: bool) -> None:
    """Empty the folder of a trial for an attempt from its start, and keep one that is over."""
    try:
        record = recorded(folder)
    except ConfigurationError:
        record = Record(())
    if record.ended is not None:
        # Nothing may be wrong with it but that its record begins in the middle.
        unwanted = not resume and record.ended.status == "valid" and record.of(TrialResumed)
        kind = "resumed" if unwanted else "failed"
        kept = first_free(
            lambda number: _earlier(folder, f"{trial.digest}.{kind}-{number}"),
            len(_kept(trial, folder, kind)) + 1,
        )
        kept.parent.mkdir(exist_ok=True)
        folder.rename(kept)
        shutil.rmtree(kept / CHECKPOINTS, ignore_errors=True)  # they may be large
        notify(f"{trial.name}: rerun; the record of the previous attempt is kept in {kept}")
    elif (folder / EVENTS_FILE).exists():
        why = "left no checkpoint to resume from" if resume else "was interrupted"
        notify(f"{trial.name}: restarted, because an earlier attempt {why}")
    # Leftovers of an interrupted attempt, including checkpoints, must not reach this one.
    shutil.rmtree(folder, ignore_errors=True)


def set_aside(trial: Trial, folder: Path, notify: Notify) -> bool:
    """Move a record of this name that is damaged or of another configuration to another folder.

    Returns whether the folder has a record of this very trial.
    """
    path, damage = folder / EVENTS_FILE, None
    try:
        started = read_trial(path).started if path.exists() else None
        digest = str(started.settings.get("digest")) if started is not None else None
    except ConfigurationError as error:
        digest, damage = "damaged", error
    if digest in (None, trial.digest):
        return digest is not None
    kept = first_free(lambda n: _earlier(folder, digest if n == 1 else f"{digest}.{n}"))
    kept.parent.mkdir(exist_ok=True)
    folder.rename(kept)
    if damage is None:
        notify(f"{trial.name}: the record of another configuration is kept in {kept}")
    else:
        notify(f"{trial.name}: its damaged record is kept in {kept}: {damage}")
    return False


def take_back(trial: Trial, folder: Path, notify: Notify) -> None:
    """Restore the record of this configuration, if one was set aside."""
    kept = _earlier(folder, trial.digest)
    if kept.is_dir() and not set_aside(trial, folder, notify):
        shutil.rmtree(folder, ignore_errors=True)  # nothing that was recorded is in it
        kept.rename(folder)
        notify(f"{trial.name}: the record of this configuration is restored from {kept.parent}")


def recorded(folder: Path) -> Record:
    """Return the record in a folder; an empty one if there is none."""
    path = folder / EVENTS_FILE
    return read_record(path) if path.exists() else Record(())


def end_unfinished(attempt: Attempt, reason: str) -> None:
    """End the record of an attempt whose driver cannot do it any more: the trial has failed."""
    record = recorded(attempt.folder)
    if record.ended is not None:
        return
    path, now = attempt.folder / EVENTS_FILE, time.time()
    if not record.events:
        described = settings(attempt.trial, attempt.circumstances)
        with EventWriter(path) as write:
            write(TrialStarted(now, attempt.trial.name, described, versions(attempt.trial.config)))
    end_record(path, TrialEnded(now, "failed", reason))


def settings(trial: Trial, circumstances: Mapping[str, int]) -> dict[str, Any]:
    """Return all settings of a trial and its circumstances, for its record."""
    return {
        "trial": trial.name,
        "experiment": trial.experiment,
        "labels": trial.labels,
        "seed": trial.seed,
        "digest": trial.digest,
        "config": trial.config.model_dump(mode="json"),
        "circumstances": dict(circumstances),
    }


def versions(config: TrialConfig) -> dict[str, str]:
    """Return the versions of the software that a trial runs on."""
    packages = (*PACKAGES, "torch") if _needs_torch(config) else PACKAGES
    own = {name: version(name) for name in packages}
    return {"python": python_version(), **own, **sections.distributions(config)}


def preload_of(config: TrialConfig) -> tuple[str, ...]:
    """Return the modules that the nodes of a trial import before they are forked."""
    torch = with_torch.PRELOAD if _needs_torch(config) else ()
    return (*PRELOAD, *torch, *sections.modules(config))


def nodes(config: TrialConfig) -> list[NodeSpec]:
    """Return the trial's nodes, each with the Dask resource of its role."""
    threads = dict.fromkeys(config.worker_nodes, config.training.workers_per_node)
    return [NodeSpec(n, resource_of(n), threads.get(n, 1)) for n in config.node_names]


def _needs_torch(config: TrialConfig) -> bool:
    return config.workload.kind == "torch"


def _kept(trial: Trial, folder: Path, kind: str) -> list[Path]:
    return list((folder.parent / EARLIER).glob(f"{folder.name}.{trial.digest}.{kind}-*"))


def _earlier(folder: Path, name: str) -> Path:
    return folder.parent / EARLIER / f"{folder.name}.{name}"
