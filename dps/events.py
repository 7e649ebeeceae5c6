"""The event records: what happened, when, where. They are the only record of a run.

Each event is a frozen dataclass that turns into one flat JSON object and back. Every number in a
report is computed from these. Times are seconds since the Unix epoch on the clock of the process
that recorded the event. Facts of each update or step come in batches (`Applied`, `Acked`,
`Reported`) as equal-length columns, so that recording costs little.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, dataclass_transform

from dps.core.names import restored_from
from dps.shown import in_a_line


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Event:
    """Root of all events, which makes each a frozen dataclass and enters it in a table by name.

    `t` is when it happened, in seconds since the Unix epoch.
    """

    kinds: ClassVar[dict[str, type[Event]]] = {}
    t: float

    def __init_subclass__(cls) -> None:
        Event.kinds[cls.__name__] = dataclass(frozen=True)(cls)


Sink = Callable[[Event], None]


# -- updates ---------------------------------------------------------------------------------


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


class WorkerJoined(Event):
    """A worker loop entered the training, on `node`."""

    worker: str
    incarnation: int
    node: str


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


class Connected(Event):
    """A node has found how its messages get to another, which is known by its address.

    `transport` is "shared_memory", "stream" or "dask"; `why` says why it is not another.
    """

    node: str
    peer: str
    transport: str
    why: str


class NodeLeaving(Event):
    """A node was told to leave, and serves on until what it has is moved away.

    `why` is "signal" (SIGTERM) or "lifetime" (the time for which its process may run is nearly
    over).
    """

    node: str
    role: str
    why: str


class TaskFailed(Event):
    """An unforeseen exception has ended a background task.

    If the task belongs to a server, the server drops all that it holds, and starts over. A task of
    the coordinator (`node` is "scheduler") is restarted. If the task belongs to a worker, its next
    request raises `InternalError`. `error` is the exception, `trace` the traceback.
    """

    node: str
    error: str
    trace: str


class NodeDrained(Event):
    """Whatever a leaving node held of shards, states and mail is on other nodes now.

    `seconds` is how long that took, since the node said that it leaves.
    """

    node: str
    seconds: float


class NodeLeft(Event):
    """A node that was told to leave ends its process, and nothing is lost by that."""

    node: str


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


class Decided(Event):
    """The coordinator has chosen how a shard goes on after a loss, and now has it carried out.

    `node` is to be the head; `how` is "reconfigure" (what is left of the chain) or "restore".
    """

    shard: int
    epoch: int
    node: str
    how: str


class Promoted(Event):
    """A replica took over as the head of its shard, holding `version`."""

    shard: int
    epoch: int
    node: str
    version: int


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


class Rebuilt(Event):
    """A shard was rebuilt from weights that `donor` (worker/incarnation) had read."""

    shard: int
    epoch: int
    donor: str
    version: int
    age_seconds: float


class ReplicaAdded(Event):
    """A replica was added at the tail of a shard's chain, holding `version`."""

    shard: int
    epoch: int
    node: str
    version: int


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


class CheckpointWritten(Event):
    """A checkpoint was published. `nbytes` includes the manifest; `seconds` is the time it took."""

    shard: int
    epoch: int
    version: int
    nbytes: int
    seconds: float


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


class CutTaken(Event):
    """Every shard has a checkpoint that holds the same updates; `seconds` is the time it took."""

    cut: int
    seconds: float


class RolledBack(Event):
    """All shards go back to a cut, because `shard` was lost, or its checkpoint was damaged."""

    shard: int
    cut: int


class CheckpointFailed(Event):
    """A checkpoint could not be written, or takes long; the one before it is still there."""

    shard: int
    epoch: int
    reason: str


class CheckpointRefused(Event):
    """A checkpoint was found torn or corrupt and was not restored; an older one is tried."""

    shard: int
    path: str
    reason: str


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


# -- injected faults ---------------------------------------------------------------------------
#
# `fault` is always the number of the fault in the trial's plan, from 0.


class Killed(Event):
    """A fault plan killed a node's process.

    `gone` tells whether the process was seen to be gone afterwards (the proof that the fault
    happened), `updates` is the number of updates applied when it was killed. `by` says how: with
    SIGKILL ("signal"), its job was requeued, or its host was taken away ("host"); then every node
    on that host has such an event. `evidence` is what a queueing system said of it, if any did.
    """

    fault: int
    node: str
    pid: int
    updates: int
    gone: bool
    by: str = "signal"
    evidence: str = ""


class Paused(Event):
    """A fault plan sent SIGSTOP to a node's process.

    `stopped` tells whether the process was seen to be stopped afterwards (the proof that the fault
    happened), `updates` is the number of updates applied when it was sent.
    """

    fault: int
    node: str
    pid: int
    updates: int
    stopped: bool


class Resumed(Event):
    """A paused process was sent SIGCONT; `running` tells whether it was seen to go on."""

    fault: int
    node: str
    pid: int
    running: bool


class FaultMissed(Event):
    """A planned fault never happened, or without effect; it makes the trial invalid."""

    fault: int
    target: str
    reason: str


class FaultSkipped(Event):
    """A fault of a random process or of a trace came when nobody was there to be hit.

    What is down already cannot fail: the trial stays valid.
    """

    fault: int
    target: str
    reason: str


class CapacityRestored(Event):
    """A fresh node was brought up in the place of a lost one."""

    fault: int
    node: str


class Disturbed(Event):
    """A fault plan began to disturb a node that goes on: slow, cut, delay, disk_full or corrupt.

    `evidence` says in words what was observed from outside, `effective` whether it proves the
    effect; `updates` is the number of updates applied when it began. What damages a shard's files
    rather than a node has "shard-0" and the like as its `node`.
    """

    fault: int
    kind: str
    node: str
    updates: int
    evidence: str
    effective: bool


class Undisturbed(Event):
    """A disturbance was taken back; `evidence` says what it was seen to have done until then."""

    fault: int
    node: str
    evidence: str


class PhaseMet(Event):
    """A fault that waited for a phase ("checkpoint" or "recovery") struck while it lasted.

    `evidence` says what was seen of the phase when the fault took effect.
    """

    fault: int
    phase: str
    evidence: str


# -- measurement -------------------------------------------------------------------------------


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


class EvaluationMissed(Event):
    """No snapshot could be scored: a shard was down, or the score itself failed (see `reason`)."""

    reason: str

    @property
    def score_failed(self) -> bool:
        """Whether it is the score that failed."""
        return self.reason.startswith((SCORE_RAISED, SCORE_RETURNED))


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


class TrialStarted(Event):
    """A trial began; `settings` is its whole configuration, `versions` the software it ran on."""

    trial: str
    settings: dict[str, Any]
    versions: dict[str, str]


class TrialResumed(Event):
    """The trial goes on from the checkpoints in `path`, of which each shard has `updates`."""

    path: str
    updates: int


class DashboardServed(Event):
    """From now on, until the trial ends, Dask's dashboard of its cluster is at this address."""

    address: str


class TrainingStarted(Event):
    """Every node is up and the workers start; time axes begin here."""

    workers: int
    shards: int
    parameters: int


class Rescaled(Event):
    """From now on, after `updates`, so many servers and workers are wanted; None: as before."""

    servers: int | None
    workers: int | None
    updates: int


class LoadMeasured(Event):
    """The load average of the last minute on the machine that drives a trial, with its `cores`.

    It is recorded when the trial begins and when it ends, unless time is virtual.
    """

    load: float
    cores: int


class TrialEnded(Event):
    """A trial ended; `status` is "valid", "invalid" (a fault did not happen) or "failed"."""

    status: str
    reason: str


# -- JSON --------------------------------------------------------------------------------------


class NotAnEvent(ValueError):
    """A line is not an event of this version of dps; the message says why."""


def to_dict(event: Event) -> dict[str, Any]:
    """Return the event as a JSON-ready dict with its class name under `event`.

    What it holds is not copied: long columns of numbers, most of the time.
    """
    return {"event": type(event).__name__, **vars(event)}


def to_json(event: Event) -> str:
    """Return the event as one line of JSON (without the newline)."""
    return json.dumps(to_dict(event), separators=(",", ":"))


def from_dict(record: Mapping[str, Any]) -> Event:
    """Rebuild an event from `to_dict`; raises `KeyError` for an unknown kind of event."""
    values = dict(record)
    cls: Callable[..., Event] = Event.kinds[values.pop("event")]
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def from_line(line: str) -> Event:
    """Return the event of a line of a record.

    Raises
    ------
    NotAnEvent
        The line is not JSON, or not an event of this version of dps.
    """
    try:
        return from_dict(json.loads(line))
    except (ValueError, LookupError, TypeError) as error:
        raise NotAnEvent(f"{type(error).__name__}: {in_a_line(str(error))}") from error


# -- lines of Python's logging -----------------------------------------------------------------
#
# `key=value`, in loggers such as `dps.shard`. What comes with every update, or several times a
# second, makes no line. Nothing is shown unless somebody asks for it: the level of a logger is
# WARNING until then, and `dps` has no handler.

logging.getLogger("dps").addHandler(logging.NullHandler())  # or Python would show warnings itself

_WRONG = (
    *(CheckpointFailed, CheckpointRefused, Detected, Failover, FaultMissed, LossReported),
    *(Returned, RolledBack, TaskFailed, TrialEnded, WorkerLeft),
)
_SUBJECTS = ("shard", "worker", "node", "target")
_PLAIN = re.compile(r"[^\s\"=]+")


def log(event: Event, labels: Mapping[str, str]) -> None:
    """Write an event to the log of this process, where that is wanted.

    Parameters
    ----------
    labels
        What else the line says, such as the group.
    """
    level = level_of(event)
    if level and logging.getLogger(_logger_of(event)).isEnabledFor(level):
        record = line_of(event, labels)
        logging.getLogger(record.name).handle(record)


def line_of(event: Event, labels: Mapping[str, str]) -> logging.LogRecord:
    """Return an event as a record of Python's logging, as of the moment when it happened.

    The message is the whole line. All of it is in the record's `fields` as well, and `trial`,
    `shard` and `epoch` are attributes of their own, for formatters that want them.
    """
    values = asdict(event).items()
    said = {key: value for key, value in values if not isinstance(value, dict | list | tuple)}
    del said["t"]
    fields: dict[str, Any] = {"event": type(event).__name__, **labels, **said}
    level = level_of(event)
    attributes: dict[str, Any] = {
        "name": _logger_of(event),
        "levelno": level,
        "levelname": logging.getLevelName(level),
        "msg": " ".join(f"{key}={_text(value)}" for key, value in fields.items()),
        "created": event.t,
        "msecs": event.t % 1 * 1000,
        "fields": fields,
    }
    attributes |= {name: fields[name] for name in ("trial", "shard", "epoch") if name in fields}
    return logging.makeLogRecord(attributes)


def level_of(event: Event) -> int:
    """The level of an event's line; `logging.NOTSET` if it has none."""
    match event:
        case Applied() | Acked() | Reported() | Filtered() | ResourceSampled():
            return logging.NOTSET
        case CheckpointWritten() | CutTaken() | Evaluated() | EvaluationMissed() | IntervalChosen():
            return logging.DEBUG
        case WorkerLeft(reason="finished" | "stopped") | TrialEnded(status="valid"):
            return logging.INFO
    return logging.WARNING if isinstance(event, _WRONG) else logging.INFO


def _logger_of(event: Event) -> str:
    subject = next((name for name in _SUBJECTS if hasattr(event, name)), "group")
    return f"dps.{'node' if subject == 'target' else subject}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
