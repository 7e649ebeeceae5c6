"""The events of a trial that `dps run` records itself, beside those of `dps.events`."""

from __future__ import annotations

import logging
from typing import Any

from dps.events import Event, OfReplica


class Audited(OfReplica):
    """A shard's final state, read after the last update.

    `applied` counts the updates of each worker in this state, and `duplicates` the refused
    duplicates of this replica. `version` must equal the sum of `applied`. `batches` counts the
    different batches of leased data.
    """

    version: int
    applied: dict[str, int]
    duplicates: int
    batches: int = 0


class TrialStarted(Event):
    """A trial began; `settings` is its configuration, `versions` that of the software."""

    trial: str
    settings: dict[str, Any]
    versions: dict[str, str]


class TrialResumed(Event):
    """The trial continues from the checkpoints in `path`, with `updates` on each shard."""

    path: str
    updates: int


class DashboardServed(Event):
    """Until the trial ends, Dask's dashboard of its cluster is at this address."""

    address: str


class TrainingStarted(Event):
    """Every node is up, and the workers start; time axes begin here."""

    workers: int
    shards: int
    parameters: int


class Rescaled(Event):
    """After `updates`, the wanted numbers of servers and workers changed; None: as before."""

    servers: int | None
    workers: int | None
    updates: int


class LoadMeasured(Event):
    """The load average of the last minute on the machine of the driver, with its `cores`.

    Recorded at the begin and the end of a trial, unless time is virtual.
    """

    load: float
    cores: int


class TrialEnded(Event):
    """A trial ended; `status` is "valid", "invalid" (a fault did not happen) or "failed"."""

    status: str
    reason: str

    @property
    def level(self) -> int:
        """INFO if it is valid, otherwise WARNING."""
        return logging.INFO if self.status == "valid" else logging.WARNING
