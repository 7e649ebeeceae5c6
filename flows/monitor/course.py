"""The state of a trial's training, from its events: of a running trial, or of a growing record."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from dps.core.functions import CALLS
from dps.events import (
    Applied,
    Detected,
    Evaluated,
    Event,
    Failover,
    LossReported,
    Moved,
    Promoted,
    ReplicaAdded,
    Reported,
    Restored,
    WorkerJoined,
    WorkerLeft,
)
from dps.observe.views import Listing, Pace, ShardView, TrainingView, WorkerView, sentence
from flows.metrics.score import ACCURACY, score_of
from flows.records.events import (
    DashboardServed,
    Rescaled,
    TrainingStarted,
    TrialEnded,
    TrialResumed,
    TrialStarted,
)

MAX_RECENT = 10
MAX_STALENESS = 200  # updates that the staleness shown is the median of
HOLD_SECONDS = 0.3  # for which a line is held: earlier events of other nodes may arrive after it
MOVE_SECONDS = 0.25  # between two looks at the state, so as not to disturb the trial


@dataclass(slots=True)
class _Shard:
    node: str = ""
    version: int | None = None
    epoch: int = 0
    others: list[str] = field(default_factory=list)
    staleness: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_STALENESS))


@dataclass(slots=True)
class _Worker:
    node: str = ""
    status: str = "running"
    clock: int | None = None
    updates: dict[int, int] = field(default_factory=dict)  # by shard
    loss: float | None = None
    began: float = 0.0
    before: int = 0

    @property
    def most(self) -> int:
        return max(self.updates.values(), default=0)


class Course:
    """The state of one trial, gathered from its events one by one.

    Attributes
    ----------
    started, training
        When the trial began, and its training; None before.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.state = "running"
        self.started: float | None = None
        self.training: float | None = None
        self.total: int | None = None
        self._notes: tuple[str, ...] = ()
        self._t = 0.0
        self._score = ACCURACY
        self._scores: dict[str, float] = {}
        self._expected = 1  # shards
        self._shards: dict[int, _Shard] = {}
        self._workers: dict[str, _Worker] = {}
        self._lost: dict[tuple[int, int], int] = {}
        self._recent: deque[tuple[float, str]] = deque(maxlen=MAX_RECENT)
        self._pace = Pace()

    @property
    def updates(self) -> int:
        """Updates that every shard has applied."""
        versions = [shard.version or 0 for shard in self._shards.values()]
        return min(versions) if versions and len(versions) >= self._expected else 0

    def take(self, event: Event) -> str | None:
        """Take an event; return a line to show if it is a fault, a loss or a recovery."""
        self._t = max(self._t, event.t)
        match event:
            case TrialStarted():
                config = event.settings.get("config", {})
                self.started, self._score = event.t, score_of(config)
                self.total = config.get("training", {}).get("updates")
                self._expected = config.get("server", {}).get("shards", 1)
            case TrainingStarted():
                self.training = event.t
            case TrialEnded():
                self.state = event.status
            case DashboardServed():
                self._notes = (f"Dask dashboard: {event.address}",)
            case Evaluated():
                self._scores = {self._score.name: event.accuracy}
            case Applied():
                self._applied(event)
            case Reported(name="loss") if event.values:
                self._worker(event.worker).loss = event.values[-1]
            case WorkerJoined():
                known = self._worker(event.worker)
                known.node, known.status, known.clock = event.node, "running", 0
                known.began, known.before = event.t, known.most
            case WorkerLeft():
                self._worker(event.worker).status = event.reason
            case LossReported():
                self._lost[event.shard, event.epoch] = event.updates
            case Detected() | Promoted() | Restored() | ReplicaAdded() | Moved():
                self._served(event)
        text = _sentence(event)
        if text is None:
            return None
        self._recent.append((event.t, text))
        if self.training is None or event.t < self.training:  # its start-up is no news
            return None
        return f"{event.t - self.training:6.2f} s  {text}"

    def view(self) -> TrainingView:
        """Return the state now."""
        goes = self.state == "running"
        shards = Listing(
            ShardView(
                number,
                shard.node,
                tuple(filter(None, (shard.node, *shard.others))),
                shard.version,
                shard.epoch,
                rate=self._rate(f"shard {number}", shard.version or 0, self.started)
                if goes
                else None,
                staleness=median(shard.staleness) if shard.staleness else None,
            )
            for number, shard in sorted(self._shards.items())
        )
        workers = Listing(
            self._view_of(name, worker, goes) for name, worker in sorted(self._workers.items())
        )
        return TrainingView(
            self.name,
            self.state,
            self._t,
            self.updates,
            self.total,
            shards,
            workers,
            sum(self._lost.values()),
            self._scores,
            None if self.started is None else self._t - self.started,
            self._notes,
            tuple(self._recent),
        )

    def _view_of(self, name: str, worker: _Worker, goes: bool) -> WorkerView:
        status = worker.status if goes or worker.status != "running" else self.state
        rate = None
        if status == "running":
            rate = self._rate(name, worker.most, worker.began, worker.before)
        reported = {} if worker.loss is None else {"loss": worker.loss}
        return WorkerView(name, status, worker.most, worker.clock, rate, reported, worker.node)

    def _rate(self, name: str, n: int, began: float | None, before: int = 0) -> float | None:
        return self._pace.of(name, self._t, n, began, before)

    def _applied(self, event: Applied) -> None:
        shard = self._shard(event.shard)
        if not event.head:
            if event.node not in shard.others:
                shard.others.append(event.node)
            return
        if event.epoch < shard.epoch and event.node != shard.node:
            return  # of the head before, which has been lost since
        shard.node, shard.version = event.node, event.versions[-1]
        shard.epoch = max(shard.epoch, event.epoch)
        shard.staleness.extend(event.staleness)
        for name, seq in zip(event.workers, event.seqs, strict=True):
            if not name.endswith(CALLS):  # whose numbers are no clock
                worker = self._worker(name)
                worker.clock = max(seq, worker.clock or 0)
                worker.updates[event.shard] = worker.updates.get(event.shard, 0) + 1
        counts = {name: worker.most for name, worker in self._workers.items()}
        versions = {f"shard {n}": s.version or 0 for n, s in self._shards.items()}
        self._pace.look(event.t, counts | versions)

    def _served(self, event: Detected | Promoted | Restored | ReplicaAdded | Moved) -> None:
        shard = self._shard(event.shard)
        shard.epoch = max(shard.epoch, event.epoch)
        match event:
            case Detected():
                shard.others = [name for name in shard.others if name != event.node]
                if not event.serving or shard.node == event.node:
                    shard.node = ""
            case Promoted() | Restored():
                shard.node, shard.version = event.node, event.version
                shard.others = [name for name in shard.others if name != event.node]
            case ReplicaAdded() if event.node not in shard.others:
                # Its first update may be recorded before the coordinator's event.
                shard.others.append(event.node)
            case Moved():
                shard.others = [event.target if n == event.source else n for n in shard.others]
                if shard.node == event.source:
                    shard.node = event.target

    def _shard(self, number: int) -> _Shard:
        return self._shards.setdefault(number, _Shard())

    def _worker(self, name: str) -> _Worker:
        return self._workers.setdefault(name, _Worker())


class Follower:
    """Turns the events of one trial into lines and progress of a view. Thread-safe event sink.

    Parameters
    ----------
    show_line
        Called with every line to show, in the order of time.
    moved
        Called with the updates so far and the state of the training, not more often than needed.
    """

    def __init__(self, show_line: Callable[[str], None], moved: Callable[[int, str], None]) -> None:
        self._course = Course()
        self.show_line = show_line
        self._moved = moved
        self._next = 0.0
        self._held: list[tuple[float, str]] = []
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Take an event."""
        with self._lock:
            line = self._course.take(event)
            if line is not None:
                self._held.append((event.t, line))
            self._release(math.inf if isinstance(event, TrialEnded) else event.t - HOLD_SECONDS)
            now = time.monotonic()
            due = line is not None or now >= self._next
            if due:
                self._next = now + MOVE_SECONDS
                state = self._course.updates, "  ".join(self._course.view().remarks())
        if due:
            self._moved(*state)

    def _release(self, until: float) -> None:
        self._held.sort(key=lambda held: held[0])
        while self._held and self._held[0][0] <= until:
            self.show_line(self._held.pop(0)[1])


def _sentence(event: Event) -> str | None:
    match event:
        case Failover():  # it repeats what other events have reported one by one
            return None
        case TrialResumed():
            return f"resumed at update {event.updates}, from checkpoints in {event.path}"
        case Rescaled():
            counts = {"servers": event.servers, "workers": event.workers}
            wanted = ", ".join(f"{n} {what}" for what, n in counts.items() if n is not None)
            return f"after {event.updates} updates, the new target is {wanted}"
    return sentence(event)
