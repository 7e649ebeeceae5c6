"""`dps top`: pictures of trainings that run, from records of trials or from a Dask scheduler.

A picture has the shards and the workers, and what was lost lately. Records are read on from where
they were read to, and a scheduler is asked once for each picture, so looking costs a training
nothing that could be measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dps.cluster.scheduler.overview import GroupOverview, overviews
from dps.cluster.scheduler.rates import GroupRates
from dps.errors import ConfigurationError
from dps.events import (
    Applied,
    Detected,
    Event,
    LossReported,
    Moved,
    Promoted,
    ReplicaAdded,
    Reported,
    Restored,
    TrialEnded,
    TrialStarted,
    WorkerJoined,
    WorkerLeft,
)
from dps.observe.progress import Pace
from dps.observe.sentences import sentence
from dps.protocol.functions import CALLS
from flows.analysis.finished import RESULTS
from flows.monitor.progress import told
from flows.monitor.status import running
from flows.records.owner import at_work
from flows.records.record import EVENTS_FILE, GRID_FILE, RecordReader, trial_names

if TYPE_CHECKING:
    from distributed import Client

MOST_RECENT = 10
MOST_STALENESS = 200  # updates that the staleness shown is the median of
ANSWER_SECONDS = 15.0  # within which a scheduler must answer
APART_SECONDS = 1.0  # between two looks, so that there is a rate


@dataclass(frozen=True, slots=True)
class ShardRow:
    """A shard: its head (`node`; "" if nobody serves it), other replicas, and how fast it goes.

    `rate` is in updates a second, `staleness` in versions: of the last updates of a trial the
    median, of those of a group the mean.
    """

    shard: int
    node: str
    version: int | None
    epoch: int
    replicas: tuple[str, ...]
    rate: float | None
    staleness: float | None


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker: whether it runs, its clock, and the last loss it reported.

    `updates` are its gradients that are applied, on the shard that has most of them, and `rate` is
    how many of these there are a second.
    """

    worker: str
    node: str
    status: str
    clock: int | None
    updates: int
    rate: float | None
    loss: float | None


@dataclass(frozen=True, slots=True)
class Happened:
    """What happened at a moment, in words."""

    t: float
    said: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A training at a moment `t`.

    `updates` every shard has applied, as last known; None: one was never heard of. `of` is how many
    there are to be, where that is known.
    """

    name: str
    state: str
    t: float
    updates: int | None
    of: int | None
    shards: tuple[ShardRow, ...]
    workers: tuple[WorkerRow, ...]
    lost: int
    recent: tuple[Happened, ...]


class Ended(ConfigurationError):
    """What pictures were taken of is not there any more."""


class Source(Protocol):
    """Where pictures come from."""

    def look(self) -> list[Picture]:
        """Return a picture of each training that runs now; raises `Ended` if none ever will."""
        ...


# -- from the record of a trial --------------------------------------------------------------------


@dataclass
class _Shard:
    node: str = ""
    version: int | None = None
    epoch: int = 0
    replicas: list[str] = field(default_factory=list)
    staleness: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_STALENESS))


@dataclass
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


class TrialSource:
    """Pictures of one trial, whose record is read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = RecordReader(path)
        self._begin()

    @property
    def ended(self) -> bool:
        """Whether the record has an end, as far as it was read."""
        return self._state != "running"

    def look(self) -> list[Picture]:
        """Read what is new, and return the picture; none before the record has a beginning."""
        events, anew = self._reader.read()
        if anew:
            self._begin()
        for event in events:
            self._take(event)
        return [self._picture()] if self._started else []

    def _begin(self) -> None:
        self._started = False
        self._state = "running"
        self._name = self._path.parent.name
        self._of: int | None = None
        self._t = self._first = 0.0
        self._shards: dict[int, _Shard] = {}
        self._workers: dict[str, _Worker] = {}
        self._lost: dict[tuple[int, int], int] = {}
        self._recent: deque[Happened] = deque(maxlen=MOST_RECENT)
        self._pace = Pace()

    def _take(self, event: Event) -> None:
        self._t = max(self._t, event.t)
        match event:
            case TrialStarted():
                self._started, self._first = True, event.t
                self._name = f"{event.settings.get('experiment')}/{self._path.parent.name}"
                training = event.settings.get("config", {}).get("training", {})
                self._of = training.get("updates")
            case TrialEnded():
                self._state = event.status
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
        if said := _said(event):
            self._recent.append(Happened(event.t, said))

    def _applied(self, event: Applied) -> None:
        shard = self._shard(event.shard)
        if not event.head:
            if event.node not in shard.replicas:
                shard.replicas.append(event.node)
            return
        shard.node, shard.version, shard.epoch = event.node, event.versions[-1], event.epoch
        shard.staleness.extend(event.staleness)
        for name, seq in zip(event.workers, event.seqs, strict=True):
            if name.endswith(CALLS):  # they have numbers of their own, which are no clock
                continue
            worker = self._worker(name)
            worker.clock = max(seq, worker.clock or 0)
            worker.updates[event.shard] = worker.updates.get(event.shard, 0) + 1
        counts = {name: worker.most for name, worker in self._workers.items()}
        versions = {f"shard {n}": s.version or 0 for n, s in self._shards.items()}
        self._pace.look(event.t, {**counts, **versions})

    def _served(self, event: Detected | Promoted | Restored | ReplicaAdded | Moved) -> None:
        shard = self._shard(event.shard)
        shard.epoch = max(shard.epoch, event.epoch)
        match event:
            case Detected():
                shard.replicas = [name for name in shard.replicas if name != event.node]
                if not event.serving or shard.node == event.node:
                    shard.node = ""
            case Promoted() | Restored():
                shard.node, shard.version = event.node, event.version
                shard.replicas = [name for name in shard.replicas if name != event.node]
            case ReplicaAdded():
                # Its first update may be recorded before the coordinator's event.
                if event.node not in shard.replicas:
                    shard.replicas.append(event.node)
            case Moved():
                shard.replicas = [event.target if n == event.source else n for n in shard.replicas]
                if shard.node == event.source:
                    shard.node = event.target

    def _shard(self, number: int) -> _Shard:
        return self._shards.setdefault(number, _Shard())

    def _worker(self, name: str) -> _Worker:
        return self._workers.setdefault(name, _Worker())

    def _picture(self) -> Picture:
        now, goes = self._t, self._state == "running"
        shards = tuple(
            ShardRow(
                number,
                shard.node,
                shard.version,
                shard.epoch,
                tuple(shard.replicas),
                self._pace.of(f"shard {number}", now, shard.version or 0, self._first)
                if goes
                else None,
                median(shard.staleness) if shard.staleness else None,
            )
            for number, shard in sorted(self._shards.items())
        )
        workers = tuple(
            WorkerRow(
                name,
                worker.node,
                worker.status if goes or worker.status != "running" else self._state,
                worker.clock,
                worker.most,
                self._pace.of(name, now, worker.most, worker.began, worker.before)
                if goes and worker.status == "running"
                else None,
                worker.loss,
            )
            for name, worker in sorted(self._workers.items())
        )
        updates = min((shard.version or 0 for shard in shards), default=0)
        lost, recent = sum(self._lost.values()), tuple(self._recent)
        state = self._state
        return Picture(self._name, state, now, updates, self._of, shards, workers, lost, recent)


class ExperimentSource:
    """Pictures of the trials of an experiment that run, from its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trials: dict[Path, TrialSource] = {}

    def look(self) -> list[Picture]:
        """Return a picture of each trial that runs now; none between two trials."""
        owner = at_work(self._folder)
        if owner is None:
            try:
                running(self._folder.parent.parent, self._folder.name)
            except ConfigurationError as error:
                raise Ended(str(error)) from error
            return []  # it has begun again since
        found: list[Picture] = []
        for name in trial_names(self._folder):
            path = self._folder / name / EVENTS_FILE
            source = self._trials.get(path)
            if source is None:
                if not path.exists() or path.stat().st_mtime < owner.since:
                    continue
                source = self._trials.setdefault(path, TrialSource(path))
            if not source.ended:
                found += [picture for picture in source.look() if not source.ended]
        return found


# -- from a scheduler ------------------------------------------------------------------------------


class SchedulerSource:
    """Pictures of the groups of a Dask scheduler, each of which says how it stands."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._address = client.scheduler.address
        self._rates: dict[str, GroupRates] = {}

    def look(self) -> list[Picture]:
        """Ask the scheduler, for some seconds at most; raises `ConfigurationError` without dps."""
        try:
            said: list[GroupOverview] = self._client.sync(
                self._client.run_on_scheduler, overviews, callback_timeout=ANSWER_SECONDS
            )
        except (ImportError, AttributeError) as error:  # as it cannot read the function there
            raise ConfigurationError(
                f"the Dask scheduler at {self._address} has no dps, or another version ({error}); "
                "install the same version there as here"
            ) from error
        except (OSError, TimeoutError, ValueError) as error:
            raise Ended(
                f"the Dask scheduler at {self._address} is gone: it does not answer any more"
            ) from error
        return [self._picture(each) for each in said]

    def _picture(self, group: GroupOverview) -> Picture:
        rates = self._rates.setdefault(group.group, GroupRates())
        rates.look(group)
        shards = tuple(
            ShardRow(
                shard.shard,
                shard.replicas[0] if shard.replicas else "",
                shard.version,
                shard.epoch,
                shard.replicas[1:],
                rates.of_shard(shard),
                rates.staleness(shard),
            )
            for shard in group.shards
        )
        workers = tuple(
            WorkerRow(
                worker.worker,
                worker.node,
                "running" if worker.active else "ended",
                worker.clock,
                worker.updates,
                rates.of_worker(worker),
                worker.loss,
            )
            for worker in group.workers
        )
        recent = [Happened(each.t, said) for each in group.recent if (said := _said(each))]
        return Picture(
            group.group,
            "running",
            group.t,
            rates.updates,
            None,
            shards,
            workers,
            group.lost,
            tuple(recent[-MOST_RECENT:]),
        )


def _said(event: Event) -> str | None:
    """An event in words, if it is one of a fault, a loss or a recovery."""
    return sentence(event) or told(event)


def source_of(target: str, here: Path) -> Source:
    """Return where pictures come from: a record, or an experiment, by its name or its folder.

    Raises
    ------
    ConfigurationError
        There is no such thing.
    """
    for folder in (Path(target), here / RESULTS / target):
        if (folder / EVENTS_FILE).is_file():
            return TrialSource(folder / EVENTS_FILE)
        if (folder / GRID_FILE).is_file():
            return ExperimentSource(folder.resolve())
    running(here, target)  # raises, with what there is
    return ExperimentSource(here / RESULTS / target)


def look_twice(source: Source, wait: Callable[[float], object] = time.sleep) -> list[Picture]:
    """Return pictures that have rates: of the second of two looks, a second apart."""
    source.look()
    wait(APART_SECONDS)
    return source.look()


# -- showing ---------------------------------------------------------------------------------------


def shown(pictures: Sequence[Picture]) -> RenderableType:
    """Return pictures as they are shown on a terminal."""
    if not pictures:
        return Text("no training runs here now", style="dim")
    return Group(*(part for picture in pictures for part in _parts(picture)))


def _parts(picture: Picture) -> Iterable[RenderableType]:
    of = "" if picture.of is None else f" of {picture.of:,}"
    lost = f", {picture.lost:,} acknowledged updates lost" if picture.lost else ""
    head = f"{picture.name}: {picture.state}, {_number(picture.updates)}{of} updates{lost}"
    yield Text(f"{head}  ({_moment(picture.t)})", style="bold")
    yield _table(
        {"shard": "right", "node": "left", "version": "right", "epoch": "right"}
        | {"updates/s": "right", "staleness": "right", "replicas": "left"},
        [
            (
                str(shard.shard),
                shard.node or ("down" if shard.epoch > 1 else "starting"),
                _number(shard.version),
                str(shard.epoch),
                _number(shard.rate, ".1f"),
                _number(None if shard.staleness is None else round(shard.staleness, 1), "g"),
                ", ".join(shard.replicas) or "–",
            )
            for shard in picture.shards
        ],
    )
    yield _table(
        {"worker": "left", "node": "left", "state": "left", "clock": "right"}
        | {"gradients": "right", "gradients/s": "right", "loss": "right"},
        [
            (
                worker.worker,
                worker.node or "–",
                worker.status,
                _number(worker.clock),
                _number(worker.updates),
                _number(worker.rate, ".1f"),
                _number(worker.loss, ".4g"),
            )
            for worker in picture.workers
        ],
    )
    for each in picture.recent:
        yield Text(f"{_moment(each.t)}  {each.said}", style="yellow")
    yield Text()


def _table(columns: dict[str, Any], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name, justify in columns.items():
        table.add_column(name, justify=justify)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _number(value: float | None, form: str = ",") -> str:
    return "–" if value is None else format(value, form)


def _moment(t: float) -> str:
    return datetime.fromtimestamp(t).strftime("%H:%M:%S")
