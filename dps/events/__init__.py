"""The event records: what happened, when, where. They are the only record of a run.

Each event is a frozen dataclass that turns into one flat JSON object and back. Every number in a
report is computed from these. Times are seconds since the Unix epoch on the clock of the process
that recorded the event. Facts of each update or step come in batches (`Applied`, `Acked`,
`Reported`) as equal-length columns, so that recording costs little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dps.core.names import restored_from
from dps.events.base import Event as Event
from dps.events.base import Sink as Sink
from dps.events.base import from_dict as from_dict
from dps.events.base import recorded as recorded
from dps.events.base import to_dict as to_dict
from dps.events.base import to_json as to_json
from dps.events.faults import CapacityRestored as CapacityRestored
from dps.events.faults import Disturbed as Disturbed
from dps.events.faults import FaultMissed as FaultMissed
from dps.events.faults import FaultSkipped as FaultSkipped
from dps.events.faults import Killed as Killed
from dps.events.faults import Paused as Paused
from dps.events.faults import PhaseMet as PhaseMet
from dps.events.faults import Resumed as Resumed
from dps.events.faults import Undisturbed as Undisturbed

# -- updates ---------------------------------------------------------------------------------


@recorded
@dataclass(frozen=True, slots=True)
class Applied(Event):
    """Updates that one replica of a shard applied, in order; row i of each column is one update.

    `staleness` is in versions, `staleness_seconds` is the age of the weights that the gradient
    came from. `replayed` says whether the update came from a buffer after an outage. A function's
    call that changed parameters is an update of its caller's, such as "worker-0/calls".
    """

    node: str
    shard: int
    epoch: int
    head: bool
    times: tuple[float, ...]
    workers: tuple[str, ...]
    incarnations: tuple[int, ...]
    seqs: tuple[int, ...]
    versions: tuple[int, ...]
    staleness: tuple[int, ...]
    staleness_seconds: tuple[float, ...]
    replayed: tuple[bool, ...]


@recorded
@dataclass(frozen=True, slots=True)
class Acked(Event):
    """Pushes that a worker was told are durable; row i of each column is one update on one shard.

    `outcomes` are "applied", "duplicate" (the shard had it already and refused it) or "buffered"
    (kept in a mailbox or in the worker, to be applied when the shard is back).
    """

    worker: str
    incarnation: int
    times: tuple[float, ...]
    shards: tuple[int, ...]
    seqs: tuple[int, ...]
    versions: tuple[int, ...]
    outcomes: tuple[str, ...]


@recorded
@dataclass(frozen=True, slots=True)
class Replayed(Event):
    """Buffered gradients were applied to a shard after an outage.

    `count` gradients entered in `steps` steps of the update rule; `duplicates` were refused
    because the shard had them already; `dropped` were left out by the policy.
    """

    shard: int
    epoch: int
    policy: str
    count: int
    steps: int
    duplicates: int
    dropped: int
    version: int


@recorded
@dataclass(frozen=True, slots=True)
class Reported(Event):
    """One number that a worker's training loop reported about its steps, such as the loss.

    Row i of each column is one step; steps count up from 1 in each incarnation. `versions` are
    those of the weights that the worker had pulled last, averaged over the shards; -1: no weights
    yet. The column is empty if the versions are unknown.
    """

    worker: str
    incarnation: int
    name: str
    times: tuple[float, ...]
    steps: tuple[int, ...]
    values: tuple[float, ...]
    versions: tuple[int, ...] = ()


@recorded
@dataclass(frozen=True, slots=True)
class Filtered(Event):
    """What a worker's filters have done to its gradients since its loop began.

    `raw_bytes` of gradients became `sent_bytes` of values and indices (each update counted once);
    of `entries`, `withheld` were not sent with their update. `residual_norm` is the Euclidean norm
    of what is withheld now: it is lost with the worker, unless that leaves in order.
    """

    worker: str
    incarnation: int
    raw_bytes: int
    sent_bytes: int
    entries: int
    withheld: int
    residual_norm: float


@recorded
@dataclass(frozen=True, slots=True)
class WorkerJoined(Event):
    """A worker loop entered the training, on `node`."""

    worker: str
    incarnation: int
    node: str


@recorded
@dataclass(frozen=True, slots=True)
class WorkerLeft(Event):
    """A worker loop ended; `reason` is "finished", "failed", "stopped", "lost" or "silent".

    It is stopped by `ParameterServer.stop`, lost with its process, and silent when its lease is
    over though its process may live.
    """

    worker: str
    incarnation: int
    reason: str

    @property
    def was_lost(self) -> bool:
        """Whether it did not end by itself."""
        return self.reason in ("lost", "silent")


# -- losses and recovery -----------------------------------------------------------------------


@recorded
@dataclass(frozen=True, slots=True)
class NodeJoined(Event):
    """A process became part of the group; `role` is what it was brought up for.

    `started` is when the process began. It tells apart processes of one node name and pid: node
    names come back, and containers have the same pids.
    """

    node: str
    role: str
    pid: int
    host: str
    started: float = 0.0


@recorded
@dataclass(frozen=True, slots=True)
class Connected(Event):
    """A node has found how its messages get to another, which is known by its address.

    `transport` is "shared_memory", "stream" or "dask"; `why` says why it is not another.
    """

    node: str
    peer: str
    transport: str
    why: str


@recorded
@dataclass(frozen=True, slots=True)
class NodeLeaving(Event):
    """A node was told to leave, and serves on until what it has is moved away.

    `why` is "signal" (SIGTERM) or "lifetime" (the time for which its process may run is nearly
    over).
    """

    node: str
    role: str
    why: str


@recorded
@dataclass(frozen=True, slots=True)
class TaskFailed(Event):
    """An unforeseen exception has ended a background task.

    If the task belongs to a server, the server drops all that it holds, and starts over. A task of
    the coordinator (`node` is "scheduler") is restarted. If the task belongs to a worker, its next
    request raises `InternalError`. `error` is the exception, `trace` the traceback.
    """

    node: str
    error: str
    trace: str


@recorded
@dataclass(frozen=True, slots=True)
class NodeDrained(Event):
    """Whatever a leaving node held of shards, states and mail is on other nodes now.

    `seconds` is how long that took, since the node said that it leaves.
    """

    node: str
    seconds: float


@recorded
@dataclass(frozen=True, slots=True)
class NodeLeft(Event):
    """A node that was told to leave ends its process, and nothing is lost by that."""

    node: str


@recorded
@dataclass(frozen=True, slots=True)
class Detected(Event):
    """The coordinator learned that a shard lost a replica; `epoch` is the new epoch.

    `serving` is whether the shard still has a replica. `by` is what noticed the end of its process:
    "monitor", "scheduler", "client" or "coordinator"; "lease" if the process was silent for too
    long; "host" if it reported its restart itself.
    """

    shard: int
    epoch: int
    node: str
    serving: bool
    by: str


@recorded
@dataclass(frozen=True, slots=True)
class Decided(Event):
    """The coordinator has chosen how a shard goes on after a loss, and now has it carried out.

    `node` is to be the head; `how` is "reconfigure" (what is left of the chain) or "restore".
    """

    shard: int
    epoch: int
    node: str
    how: str


@recorded
@dataclass(frozen=True, slots=True)
class Promoted(Event):
    """A replica took over as the head of its shard, holding `version`."""

    shard: int
    epoch: int
    node: str
    version: int


@recorded
@dataclass(frozen=True, slots=True)
class Restored(Event):
    """A shard began to serve from a copy; `source` is "initial", "checkpoint", "store" or "worker".

    Versions after `version` of earlier epochs are lost. The start of a run is recorded the same
    way, as the restoration of version 0 in epoch 1. So is an attempt that came to nothing, perhaps
    only after a later one: nobody is served in its epoch.
    """

    shard: int
    epoch: int
    node: str
    version: int
    source: str


@recorded
@dataclass(frozen=True, slots=True)
class LossReported(Event):
    """A shard that was restored, in `epoch`, lacks `updates` that workers were told are durable.

    It is recorded once all workers that take part have said what they were told, and again when
    more becomes known later. Not `exact`: there are at least so many, as a worker was lost too.
    `source` and `version` are those of the restored state, and `cause` says why it was restored.
    """

    shard: int
    epoch: int
    updates: int
    exact: bool
    source: str
    version: int
    cause: str = ""


@recorded
@dataclass(frozen=True, slots=True)
class Failover(Event):
    """A shard that had lost one or more replicas is served again, in `epoch`.

    `str` describes the failover in one line. `lost` names the nodes, and `by` what noticed the
    first loss (as in `Detected`). `seconds` is the time from then until the shard was served again.
    `node` is the head now; `took_over` is whether another node was the head before. `copies` of the
    `wanted` replicas are left. `source` is "replica" if one of them continues, which loses nothing.
    Otherwise the shard was restored from `source` (as in `Restored`) at `version`, because of
    `cause`, and `updates_lost` acknowledged updates were lost: at least that many if not `exact`.
    """

    shard: int
    epoch: int
    lost: str
    by: str
    seconds: float
    node: str
    took_over: bool
    copies: int
    wanted: int
    source: str
    version: int
    cause: str
    updates_lost: int
    exact: bool

    def __str__(self) -> str:
        went_on = "took over" if self.took_over else "serves on"
        became = "silent" if self.lost == self.node and not self.took_over else "lost"
        copies = f", with {self.copies} of {self.wanted} copies" if self.wanted > 1 else ""
        if self.source == "replica":
            what = "no update was lost"
        else:
            some = "" if self.exact else "at least "
            what = (
                f"restored from {restored_from(self.source, self.version)}, because {self.cause}; "
                f"{some}{self.updates_lost} acknowledged updates were lost"
            )
        lost = f"nodes {self.lost} were" if ", " in self.lost else f"node {self.lost} was"
        noticed = "its lease ended" if self.by == "lease" else f"noticed by the {self.by}"
        return (
            f"shard {self.shard}: {lost} {became} ({noticed}), node {self.node} {went_on} after "
            f"{self.seconds:.2f} s{copies}; {what}"
        )


@recorded
@dataclass(frozen=True, slots=True)
class Rebuilt(Event):
    """A shard was rebuilt from weights that `donor` (worker/incarnation) had read."""

    shard: int
    epoch: int
    donor: str
    version: int
    age_seconds: float


@recorded
@dataclass(frozen=True, slots=True)
class ReplicaAdded(Event):
    """A replica was added at the tail of a shard's chain, holding `version`."""

    shard: int
    epoch: int
    node: str
    version: int


@recorded
@dataclass(frozen=True, slots=True)
class Moved(Event):
    """A replica of a shard has gone from node `source` to `target`, which serves in `epoch`.

    `nbytes` is the size of its weights without rows of sparse tables, `seconds` the time that the
    whole move took, and `pause_seconds` the part of it in which the old holder had stopped and
    nobody served yet.
    """

    shard: int
    epoch: int
    source: str
    target: str
    nbytes: int
    seconds: float
    pause_seconds: float


@recorded
@dataclass(frozen=True, slots=True)
class CheckpointWritten(Event):
    """A checkpoint was published. `nbytes` includes the manifest; `seconds` is the time it took."""

    shard: int
    epoch: int
    version: int
    nbytes: int
    seconds: float


@recorded
@dataclass(frozen=True, slots=True)
class IntervalChosen(Event):
    """A server has chosen another interval for the checkpoints of a shard (`every="auto"`).

    At most `every` acked updates are at risk from now on. A write costs `cost` seconds of training,
    `rate` updates a second are applied while none is under way, and a shard is taken to be lost
    every `mtbf` seconds.
    """

    shard: int
    epoch: int
    every: int
    cost: float
    rate: float
    mtbf: float


@recorded
@dataclass(frozen=True, slots=True)
class PartsRestored(Event):
    """A shard's state of this `version` was put together from partial checkpoints.

    Of its `units`, blocks and pages of rows, `older` are of earlier versions, the oldest of version
    `oldest`: updates after that one may be lost to some of them.
    """

    shard: int
    epoch: int
    version: int
    oldest: int
    older: int
    units: int


@recorded
@dataclass(frozen=True, slots=True)
class CutTaken(Event):
    """Every shard has a checkpoint that holds the same updates; `seconds` is the time it took."""

    cut: int
    seconds: float


@recorded
@dataclass(frozen=True, slots=True)
class RolledBack(Event):
    """All shards go back to a cut, because `shard` was lost, or its checkpoint was damaged."""

    shard: int
    cut: int


@recorded
@dataclass(frozen=True, slots=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written, or takes long; the one before it is still there."""

    shard: int
    epoch: int
    reason: str


@recorded
@dataclass(frozen=True, slots=True)
class CheckpointRefused(Event):
    """A checkpoint was found torn or corrupt and was not restored; an older one is tried."""

    shard: int
    path: str
    reason: str


@recorded
@dataclass(frozen=True, slots=True)
class Returned(Event):
    """A parameter server is up again, after the driver or the scheduler of its program was lost.

    It took `seconds` since the loss was noticed. `returns` counts how often the program was started
    again. Shards go on with these `versions` (none: it began anew), and lack at least `lost`
    updates each: of those that they were seen to have, a quarter of a second before at most, or
    that another shard has.
    """

    cause: str
    returns: int
    seconds: float
    versions: tuple[int, ...]
    lost: tuple[int, ...]

    def __str__(self) -> str:
        """What happened, in a sentence."""
        where = "goes on from its newest complete checkpoints" if self.versions else "begins anew"
        lacking = [f"shard {shard} {n:,}" for shard, n in enumerate(self.lost) if n]
        lost = f"at least so many updates are lost: {', '.join(lacking)}"
        return (
            f"{self.cause}; the training {where} after {self.seconds:.1f} s, and "
            f"{lost if lacking else 'no update is known to be lost'}"
        )


# -- measurement -------------------------------------------------------------------------------


@recorded
@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """The evaluator scored a snapshot read at `t`; `updates` is the mean of its versions.

    `objective` and `stationarity` are of the problem that is trained on, where they are asked for.
    """

    updates: float
    loss: float
    accuracy: float
    objective: float | None = None
    stationarity: float | None = None


SCORE_RAISED, SCORE_RETURNED = "the score raised", "the score returned"


@recorded
@dataclass(frozen=True, slots=True)
class EvaluationMissed(Event):
    """No snapshot could be scored: a shard was down, or the score itself failed (see `reason`)."""

    reason: str

    @property
    def score_failed(self) -> bool:
        """Whether it is the score that failed."""
        return self.reason.startswith((SCORE_RAISED, SCORE_RETURNED))


@recorded
@dataclass(frozen=True, slots=True)
class ResourceSampled(Event):
    """What one process has used since it started.

    `cpu_seconds` is user + system; `peak_bytes` the largest resident set; `sent` and `received`
    are the bytes of dps messages by link kind ("train", "replicate", "store", "control");
    `stored` is the bytes this node holds for others (store, mailbox) now. `host` and `started`
    identify the process, as in `NodeJoined`.
    """

    node: str
    role: str
    pid: int
    cpu_seconds: float
    peak_bytes: int
    sent: dict[str, int]
    received: dict[str, int]
    stored: int
    host: str = ""
    started: float = 0.0


@recorded
@dataclass(frozen=True, slots=True)
class Audited(Event):
    """A shard's final state, read after the last update.

    `applied` counts the updates of each worker in this state, `duplicates` the pushes that this
    replica refused because it had them. `version` must equal the sum of `applied`.
    """

    shard: int
    epoch: int
    node: str
    version: int
    applied: dict[str, int]
    duplicates: int


@recorded
@dataclass(frozen=True, slots=True)
class TrialStarted(Event):
    """A trial began; `settings` is its whole configuration, `versions` the software it ran on."""

    trial: str
    settings: dict[str, Any]
    versions: dict[str, str]


@recorded
@dataclass(frozen=True, slots=True)
class TrialResumed(Event):
    """The trial goes on from the checkpoints in `path`, of which each shard has `updates`."""

    path: str
    updates: int


@recorded
@dataclass(frozen=True, slots=True)
class DashboardServed(Event):
    """From now on, until the trial ends, Dask's dashboard of its cluster is at this address."""

    address: str


@recorded
@dataclass(frozen=True, slots=True)
class TrainingStarted(Event):
    """Every node is up and the workers start; time axes begin here."""

    workers: int
    shards: int
    parameters: int


@recorded
@dataclass(frozen=True, slots=True)
class Rescaled(Event):
    """From now on, after `updates`, so many servers and workers are wanted; None: as before."""

    servers: int | None
    workers: int | None
    updates: int


@recorded
@dataclass(frozen=True, slots=True)
class LoadMeasured(Event):
    """The load average of the last minute on the machine that drives a trial, with its `cores`.

    It is recorded when the trial begins and when it ends, unless time is virtual.
    """

    load: float
    cores: int


@recorded
@dataclass(frozen=True, slots=True)
class TrialEnded(Event):
    """A trial ended; `status` is "valid", "invalid" (a fault did not happen) or "failed"."""

    status: str
    reason: str
