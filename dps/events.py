"""The events of a training, which are its only record: every number of a report comes from them.

Each event is a frozen dataclass that can be converted to one flat JSON object and back. Times are
seconds since the Unix epoch on the clock of the process that recorded the event. Events of each
update or step come in batches (`Applied`, `Acked`, `Reported`), as columns of equal length.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, dataclass_transform

from dps.core.names import restored_from


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Event:
    """Base of all events; it makes them frozen dataclasses and registers them by name.

    `t` is the time in seconds since the Unix epoch.

    >>> event = Promoted(t=0.5, shard=0, epoch=2, node="replica-0-1", version=317)
    >>> from_dict(to_dict(event)) == event
    True
    """

    kinds: ClassVar[dict[str, type[Event]]] = {}
    _level: ClassVar[int]
    t: float

    def __init_subclass__(cls, recorded: bool = True, level: int = logging.INFO) -> None:
        dataclass(frozen=True)(cls)
        cls._level = level
        if recorded:
            Event.kinds[cls.__name__] = cls

    @property
    def level(self) -> int:
        """The level of its line in Python's logging; `logging.NOTSET` if it has none."""
        return self._level


class OfWorker(Event, recorded=False):
    """An event of one life of a worker; lives are numbered from 1."""

    worker: str
    incarnation: int


class OfShard(Event, recorded=False):
    """An event of a shard, in an epoch of its replicas."""

    shard: int
    epoch: int


class OfReplica(OfShard, recorded=False):
    """An event of a shard's replica on a node."""

    node: str


Sink = Callable[[Event], None]


# -- updates ---------------------------------------------------------------------------------


class Applied(Event, level=logging.NOTSET):
    """Updates that a replica of a shard applied, in order; row i of each column is one update.

    `staleness` is in versions, `staleness_seconds` the age of the gradient's weights. `replayed`
    updates were buffered during an outage. A call of a function is one of a worker such as
    "worker-0/calls".
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


class Acked(OfWorker, level=logging.NOTSET):
    """Pushes that a worker knows to be durable; row i of each column is one update on one shard.

    `outcomes` are "applied", "duplicate" (refused, because the shard had it), "repeated" (refused,
    because it had another update of the same batch of leased data) or "buffered" (in a
    mailbox or the worker, until the shard is back).
    """

    times: tuple[float, ...]
    shards: tuple[int, ...]
    seqs: tuple[int, ...]
    versions: tuple[int, ...]
    outcomes: tuple[str, ...]


class Replayed(OfShard):
    """`count` buffered gradients were applied to a shard, in `steps` steps, after an outage.

    `duplicates` were refused, because the shard had them; the policy `dropped` others.
    """

    policy: str
    count: int
    steps: int
    duplicates: int
    dropped: int
    version: int


class Reported(OfWorker, level=logging.NOTSET):
    """A number that a worker's training loop reported of each step, such as the loss.

    Row i of each column is one step; steps count from 1. `versions` are those of the last pulled
    weights, averaged over the shards; -1: none yet. The column is empty if they are unknown.
    """

    name: str
    times: tuple[float, ...]
    steps: tuple[int, ...]
    values: tuple[float, ...]
    versions: tuple[int, ...] = ()


class Filtered(OfWorker, level=logging.NOTSET):
    """The effect of a worker's filters on its gradients since its loop began.

    `raw_bytes` of gradients became `sent_bytes` of values and indices (each update counted once);
    of `entries`, `withheld` were not sent with their update. `residual_norm` is the Euclidean norm
    of the residuals now, which are lost with the worker unless it leaves in order.
    """

    raw_bytes: int
    sent_bytes: int
    entries: int
    withheld: int
    residual_norm: float


class WorkerJoined(OfWorker):
    """A worker entered the training, on `node`."""

    node: str


class WorkerLeft(OfWorker):
    """A worker left; `reason` is "finished", "failed", "stopped", "lost" or "silent".

    `ParameterServer.stop` stops it. It is lost with its process, and silent if its lease is over
    although its process may live.
    """

    reason: str

    @property
    def was_lost(self) -> bool:
        """Whether the worker was removed, because it was lost or silent."""
        return self.reason in ("lost", "silent")

    @property
    def level(self) -> int:
        """INFO if it has finished or was stopped, otherwise WARNING."""
        ended = self.reason in ("finished", "stopped")
        return logging.INFO if ended else logging.WARNING


# -- losses and recovery -----------------------------------------------------------------------


class NodeJoined(Event):
    """A process joined the group in a `role`.

    `started`, the begin of the process, distinguishes processes of the same node name and pid.
    """

    node: str
    role: str
    pid: int
    host: str
    started: float = 0.0


class Connected(Event):
    """A node has chosen the transport of its messages to another, `peer`, an address.

    `transport` is "shared_memory", "stream" or "dask", and `why` the reason.
    """

    node: str
    peer: str
    transport: str
    why: str


class NodeLeaving(Event):
    """A node is to leave, and serves until its shards and states are moved away.

    `why` is "signal" (SIGTERM) or "lifetime" (the lifetime of its process is nearly over).
    """

    node: str
    role: str
    why: str


class TaskFailed(Event, level=logging.WARNING):
    """An unforeseen exception has ended a background task.

    A server drops all that it holds, and starts over. A task of the coordinator (`node` is
    "scheduler") is restarted. The next request of a worker raises `InternalError`.
    """

    node: str
    error: str
    trace: str


class NodeDrained(Event):
    """All shards, states and mail of a leaving node are on other nodes, after `seconds`."""

    node: str
    seconds: float


class NodeLeft(Event):
    """A node that left ends its process; nothing is lost."""

    node: str


class Detected(OfReplica, level=logging.WARNING):
    """The coordinator learned that a shard lost a replica; `epoch` is the new epoch.

    `serving` is whether the shard still has a replica. `by` is what noticed the end of its process:
    "monitor", "scheduler", "client" or "coordinator"; "lease" if the process was silent for too
    long; "host" if it reported its restart itself.
    """

    serving: bool
    by: str


class Decided(OfReplica):
    """The coordinator has chosen the recovery of a shard, with `node` as the head.

    `how` is "reconfigure" (the rest of the chain) or "restore".
    """

    how: str


class Promoted(OfReplica):
    """A replica took over as the head of its shard, holding `version`."""

    version: int


class Restored(OfReplica):
    """A shard began to serve from a copy; `source` is "initial", "checkpoint", "store" or "worker".

    Later versions of earlier epochs are lost. A run starts by restoring version 0 in epoch 1. A
    failed attempt is recorded too, perhaps after a later one: its epoch serves no requests.
    """

    version: int
    source: str


class LossReported(OfShard, level=logging.WARNING):
    """A shard that was restored, in `epoch`, lacks `updates` that were acknowledged.

    It is recorded after the reports of all workers, and again if more losses become known. If not
    `exact`, a worker was lost too, and `updates` is a lower bound. `source` and `version` are those
    of the restored state, and `cause` is the reason of the restoration.
    """

    updates: int
    exact: bool
    source: str
    version: int
    cause: str = ""


class Failover(OfShard, level=logging.WARNING):
    """A shard that had lost one or more replicas is served again, in `epoch`.

    `str` describes the failover in one line. `lost` names the nodes, and `by` what noticed the
    first loss (as in `Detected`). `seconds` is the time from then until the shard was served again.
    `node` is the head now; `took_over` is whether another node was the head before. `copies` of the
    `wanted` replicas are left. `source` is "replica" if one of them continues, which loses nothing.
    Otherwise the shard was restored from `source` (as in `Restored`) at `version`, because of
    `cause`, and `updates_lost` acknowledged updates were lost: at least that many if not `exact`.
    """

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
        noticed = "its lease ended" if self.by == "lease" else f"detected by the {self.by}"
        return (
            f"shard {self.shard}: {lost} {became} ({noticed}), node {self.node} {went_on} after "
            f"{self.seconds:.2f} s{copies}; {what}"
        )


class Rebuilt(OfShard):
    """A shard was rebuilt from weights that `donor` (worker/incarnation) had read."""

    donor: str
    version: int
    age_seconds: float


class ReplicaAdded(OfReplica):
    """A replica was added at the tail of a shard's chain, holding `version`."""

    version: int


class Moved(OfShard):
    """A replica of a shard has moved from node `source` to `target`, which serves in `epoch`.

    `nbytes` is the size of its weights without sparse tables. No node served the shard for
    `pause_seconds` of the `seconds` that it took.
    """

    source: str
    target: str
    nbytes: int
    seconds: float
    pause_seconds: float


class CheckpointWritten(OfShard, level=logging.DEBUG):
    """A checkpoint was published. `nbytes` includes the manifest; `seconds` is the time it took."""

    version: int
    nbytes: int
    seconds: float


class IntervalChosen(OfShard, level=logging.DEBUG):
    """A server has chosen another interval for the checkpoints of a shard (`every="auto"`).

    At most `every` acked updates are at risk from now on. The estimates are `cost`, the delay of
    training by a write in seconds; `rate`, updates per second without a write; and `mtbf`, seconds
    between losses of a shard.
    """

    every: int
    cost: float
    rate: float
    mtbf: float


class PartsRestored(OfShard):
    """A shard's state of this `version` was assembled from partial checkpoints.

    Of its `units`, blocks and pages of rows, `older` are of earlier versions, down to `oldest`:
    these may lack updates after it.
    """

    version: int
    oldest: int
    older: int
    units: int


class CutTaken(Event, level=logging.DEBUG):
    """Every shard has written a checkpoint with the same updates, within `seconds`."""

    cut: int
    seconds: float


class RolledBack(Event, level=logging.WARNING):
    """All shards go back to a cut, because `shard` was lost, or its checkpoint was damaged."""

    shard: int
    cut: int


class CheckpointFailed(OfShard, level=logging.WARNING):
    """A checkpoint could not be written, or takes long; the previous one is kept."""

    reason: str


class CheckpointRefused(Event, level=logging.WARNING):
    """A checkpoint is damaged and was not restored; an older one is tried."""

    shard: int
    path: str
    reason: str


class Returned(Event, level=logging.WARNING):
    """A parameter server is up again, `seconds` after the loss of its driver or scheduler.

    `returns` counts the restarts of the program. Shards continue with these `versions` (empty: from
    the beginning), and lack at least `lost` of the updates known a quarter of a second before.
    """

    cause: str
    returns: int
    seconds: float
    versions: tuple[int, ...]
    lost: tuple[int, ...]

    def __str__(self) -> str:
        how = "continues from its newest checkpoints" if self.versions else "starts over"
        lacking = [f"at least {n:,} of shard {shard}" for shard, n in enumerate(self.lost) if n]
        lost = (
            f"updates are lost: {', '.join(lacking)}"
            if lacking
            else "no update is known to be lost"
        )
        return f"{self.cause}; the training {how} after {self.seconds:.1f} s, and {lost}"


# -- injected faults ---------------------------------------------------------------------------
#
# `fault` is always the number of the fault in the trial's plan, from 0.


class Killed(Event):
    """A fault plan killed a node's process, after `updates` updates.

    `gone`, the proof of the fault, is whether the process was seen to be gone. `by` is "signal"
    (SIGKILL), "requeue" (its job was requeued) or "host" (its host was taken away; then every node
    on that host has such an event). `evidence` is the report of a queueing system, if any.
    """

    fault: int
    node: str
    pid: int
    updates: int
    gone: bool
    by: str = "signal"
    evidence: str = ""


class Paused(Event):
    """A fault plan sent SIGSTOP to a node's process, after `updates` updates.

    `stopped`, the proof of the fault, is whether the process was seen to be stopped.
    """

    fault: int
    node: str
    pid: int
    updates: int
    stopped: bool


class Resumed(Event):
    """A paused process was sent SIGCONT; `running` is whether it was seen to run."""

    fault: int
    node: str
    pid: int
    running: bool


class FaultMissed(Event, level=logging.WARNING):
    """A planned fault did not happen, or had no effect; the trial is invalid."""

    fault: int
    target: str
    reason: str


class FaultSkipped(Event):
    """An optional fault had no node to hit: a node that is down cannot fail. The trial is valid."""

    fault: int
    target: str
    reason: str


class CapacityRestored(Event):
    """A fresh node has replaced a lost one."""

    fault: int
    node: str


class Disturbed(Event):
    """A fault of another `kind` than kill and pause began, such as "slow", after `updates` updates.

    `evidence` describes the observation from outside, and `effective` is whether it proves the
    effect. For files of a shard, `node` is "shard-0" or similar.
    """

    fault: int
    kind: str
    node: str
    updates: int
    evidence: str
    effective: bool


class Undisturbed(Event):
    """A fault was reverted; `evidence` describes its effect until then."""

    fault: int
    node: str
    evidence: str


class PhaseMet(Event):
    """A fault struck during the phase that it waited for, "checkpoint" or "recovery".

    `evidence` describes the observed phase.
    """

    fault: int
    phase: str
    evidence: str


# -- measurement -------------------------------------------------------------------------------


class Evaluated(Event, level=logging.DEBUG):
    """The evaluator scored a snapshot read at `t`; `updates` is the mean of its versions.

    `objective` and `stationarity` of the training problem are optional.
    """

    updates: float
    loss: float
    accuracy: float
    objective: float | None = None
    stationarity: float | None = None


class EvaluationMissed(Event, level=logging.DEBUG):
    """No snapshot could be scored: a shard was down, or the user's score itself failed."""

    reason: str
    score_failed: bool = False


class ResourceSampled(Event, level=logging.NOTSET):
    """The resources that a process has used since it started.

    `cpu_seconds` is user + system; `peak_bytes` the largest resident set; `sent` and `received` are
    bytes of messages by kind of link ("train", "replicate", "store", "control"); `stored` is the
    size of states and mail that it holds now. `host` and `started` are as in `NodeJoined`.
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


# -- JSON --------------------------------------------------------------------------------------


def to_dict(event: Event) -> dict[str, Any]:
    """Return the event as a JSON-ready dict, with its class name under `event`; without copies."""
    return {"event": type(event).__name__, **vars(event)}


def to_json(event: Event) -> str:
    """Return the event as one line of JSON (without the newline)."""
    return json.dumps(to_dict(event), separators=(",", ":"))


def from_dict(record: Mapping[str, Any]) -> Event:
    """Rebuild an event from `to_dict`.

    An unknown kind of event raises `KeyError`; other fields than those of its kind, `TypeError`.
    """
    values = dict(record)
    cls: Callable[..., Event] = Event.kinds[values.pop("event")]
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


# -- lines of Python's logging -----------------------------------------------------------------
#
# `key=value`, in loggers such as `dps.shard`. Frequent events make no line. `dps` has no handler,
# and its level is WARNING unless the user sets it.

logging.getLogger("dps").addHandler(logging.NullHandler())  # or Python would print warnings itself

_SUBJECTS = ("shard", "worker", "node", "target")
_PLAIN = re.compile(r"[^\s\"=]+")


def log(event: Event, labels: Mapping[str, str]) -> None:
    """Write an event to the log of this process, with labels such as the group."""
    logger = logging.getLogger(_logger_of(event))
    if event.level and logger.isEnabledFor(event.level):
        logger.handle(line_of(event, labels))


def line_of(event: Event, labels: Mapping[str, str]) -> logging.LogRecord:
    """Return an event as a record of Python's logging, at the time of the event.

    The message is the whole line. For formatters, the record has all of it as `fields`.
    """
    values = {k: v for k, v in vars(event).items() if not isinstance(v, dict | list | tuple)}
    del values["t"]
    fields = {"event": type(event).__name__, **labels, **values}
    text = " ".join(f"{key}={_text(value)}" for key, value in fields.items())
    record = logging.LogRecord(_logger_of(event), event.level, "", 0, text, None, None)
    vars(record).update(created=event.t, msecs=event.t % 1 * 1000, fields=fields)
    return record


def _logger_of(event: Event) -> str:
    subject = next((name for name in _SUBJECTS if hasattr(event, name)), "group")
    return f"dps.{'node' if subject == 'target' else subject}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
