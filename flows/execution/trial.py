"""One trial, from fresh processes to the last event. Start reading here: it names every layer.

A trial opens a cluster (by default, processes on this machine). On it, it starts a parameter
server, the workers, an evaluator on a separate node, and an injector that carries out the fault
plan. Everything that happens is an event, and all results of a trial follow from its events.
"""

from __future__ import annotations

import logging
import math
import os
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from distributed import Client
from distributed.client import FutureCancelledError, FuturesCancelledError

from dps.cluster.backends.base import Cluster
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.platform import Platform, Running, platform_of
from dps.cluster.supervision.session import SchedulerWatch
from dps.core.credentials import masked
from dps.core.names import NODE_ROLES, replacement, role_of
from dps.errors import ConfigurationError, DpsError, SchedulerLost, StoreUnavailable
from dps.events import CheckpointRefused, Event, FaultMissed, Killed, NodeLeaving, Sink
from dps.faults import AtUpdates, FaultPlan
from dps.faults.injector import Injector
from dps.faults.targets import obstacles
from dps.protocol.executor import available_cores
from dps.protocol.timings import Timings
from dps.recovery.strategy import with_checkpoint_path
from flows.config.experiment import TrialConfig, built
from flows.config.trials import Trial
from flows.execution.attempt import CHECKPOINTS, nodes, preload_of, settings, versions
from flows.execution.training import Scorer, initial, warm_up
from flows.execution.workers import ElasticWorkerPool, WorkerPool
from flows.files import open_own
from flows.records.events import (
    Audited,
    DashboardServed,
    LoadMeasured,
    TrainingStarted,
    TrialEnded,
    TrialResumed,
    TrialStarted,
)
from flows.records.log import LOG_FILE, TrialLog
from flows.records.record import EVENTS_FILE, EventWriter, without_secrets

LOST = "scheduler-connection-lost"  # Dask's reason for cancelled futures
TRACEBACK_FILE = "traceback.txt"
LOOK_SECONDS = 0.25
# A fault is recorded once it is proven; until then, the loss of its victim looks unplanned.
PROOF_SECONDS = 3.0

Notify = Callable[[str], None]


def run_trial(
    trial: Trial,
    folder: Path,
    sink: Sink,
    path: str | None = None,
    circumstances: Mapping[str, int] | None = None,
    notify: Notify = lambda _: None,
    plan: FaultPlan | None = None,
    lost: Notify | None = None,
) -> None:
    """Run one trial and record it in `folder`.

    Raises `StoreUnavailable` if the end cannot be recorded, or the record cannot be opened.

    Parameters
    ----------
    folder
        Gets `events.jsonl`, `trial.log`, and the trial's checkpoints if it writes any.
    sink
        Called with every event as well, from another thread.
    path
        Checkpoints of this trial to resume from; None: from its start.
    circumstances
        See `flows.execution.attempt.Attempt`.
    notify
        Called with lines for the user, such as the address of Dask's dashboard.
    plan
        The faults, if not those that follow from the configuration: see `flows.execution.rerun`.
    lost
        Called with the reason when the Dask scheduler that was started for the trial is lost: as
        soon as that is known, in another thread, and again before this returns. The record then has
        no end, so that the trial can be resumed. None: the trial fails.

    Notes
    -----
    In all other cases the record ends with `TrialEnded`, except after an interruption
    (`KeyboardInterrupt`): then it just stops, and the processes are ended before the interruption
    is raised. An unforeseen error fails the trial as well, and leaves its traceback beside the
    record. If an event cannot be written, the training is stopped, so that none runs unrecorded.
    """
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # a lost node is no news here
    with (
        EventWriter(folder / EVENTS_FILE) as write,
        TrialLog(folder / LOG_FILE, _labels(trial)) as log,
    ):
        record = _Recorder(trial.config, write, log, sink)
        now, kept = record.clock.now(), settings(trial, circumstances or {})
        record(TrialStarted(now, trial.name, kept, versions(trial.config)))
        record.measure_load()
        try:
            failure = _train(trial, folder, record, path, notify, plan, lost)
        except SchedulerLost as error:
            if lost is not None and write.failure is None:
                lost(str(error))
                return
            failure = reason_of(error, folder)
        except Exception as error:  # noqa: BLE001 (a defect in one trial must not stop the others)
            failure = reason_of(error, folder)
        record.end(failure)


class _Recorder:
    """Records the events of a trial, logs them and passes them on. Thread-safe.

    Attributes
    ----------
    clock
        The clock of the cluster, once it exists.
    listeners
        Called with every event as well.
    """

    def __init__(self, config: TrialConfig, write: EventWriter, log: TrialLog, sink: Sink) -> None:
        self.clock = config.cluster.clock
        self.listeners: list[Sink] = [log, sink]
        self._virtual = config.cluster.kind == "virtual"
        self._write = write
        self._missed: list[FaultMissed] = []
        self._stop: Callable[[], object] = lambda: None

    def __call__(self, event: Event) -> None:
        event = without_secrets(event)
        if isinstance(event, FaultMissed):
            self._missed.append(event)
        try:
            self._write(event)
        except StoreUnavailable:  # it is the reason why the trial fails
            self._stop()
        for listener in self.listeners:
            listener(event)

    @contextmanager
    def stopping(self, ps: ParameterServer, platform: Platform) -> Iterator[None]:
        """Stop the training as soon as an event cannot be recorded, or at once if one was not."""
        stopping: list[Running] = []
        self._stop = lambda: stopping.append(platform.start(ps.stop, "dps-unrecorded"))
        if self._write.failure is not None:
            self._stop()
        try:
            yield
        finally:
            self._stop = lambda: None
            for running in stopping:
                running.join()

    def measure_load(self) -> None:
        """Record how busy this machine is, where that matters."""
        if not self._virtual:
            self(LoadMeasured(self.clock.now(), os.getloadavg()[0], available_cores()))

    def end(self, failure: str | None) -> None:
        """Record the end: why the trial failed, or that its faults happened as planned or not."""
        if self._write.failure is not None:
            failure = f"StoreUnavailable: {self._write.failure}"
        else:
            self.measure_load()
        status, reason = "valid", ""
        if failure is not None:
            status, reason = "failed", failure
        elif self._missed:
            reason = "; ".join(f"fault on {m.target}: {m.reason}" for m in self._missed)
            status = "invalid"
        ended = without_secrets(TrialEnded(self.clock.now(), status, reason))
        for listener in self.listeners:
            listener(ended)
        self._write.end(ended)


def reason_of(error: Exception, folder: Path) -> str:
    """Return why a trial failed; an unforeseen error leaves its traceback beside the record."""
    if isinstance(error, FutureCancelledError | FuturesCancelledError) and LOST in str(error):
        return "Dask's scheduler was lost, and the coordinator with it"
    reason = masked(f"{type(error).__name__}: {error}")
    if isinstance(error, DpsError | OSError):
        return reason
    try:
        with open_own(folder / TRACEBACK_FILE, "w", encoding="utf-8") as file:
            file.write(masked("".join(traceback.format_exception(error))))
    except OSError:
        return f"{reason} (unforeseen)"
    return f"{reason} (unforeseen; see {TRACEBACK_FILE} beside the record)"


def _train(
    trial: Trial,
    folder: Path,
    record: _Recorder,
    path: str | None,
    notify: Notify,
    plan: FaultPlan | None,
    lost: Notify | None,
) -> str | None:
    """Train under the fault plan; return why it failed, or None."""
    config = trial.config
    with config.cluster.open(nodes(config), preload_of(config), notify, config.seed) as cluster:
        client, platform = cluster.client, platform_of(cluster.client)
        record.clock = clock = platform.clock
        if cluster.dashboard is not None:
            record(DashboardServed(clock.now(), cluster.dashboard))
            notify(masked(f"Dask dashboard: {cluster.dashboard}"))
        for note in cluster.notes:
            notify(masked(f"warning: {note}"))
        watched = _watched(client, lost if config.cluster.starts_scheduler else None)
        with watched as is_up, _Replacing(cluster, notify) as replacing, ExitStack() as closing:
            record.listeners.append(replacing.note)
            ps = _server(trial, cluster, folder, record, path)
            closing.callback(ps.close, checkpoint=False)  # what it writes is counted
            is_up(ps)
            # Loading large data takes seconds, more for the first worker on a machine.
            at = [node.address for node in ps.nodes if node.role == "worker"]
            keys = [f"dps-warm-up-{uuid.uuid4().hex[:8]}" for _ in at]
            loads = zip(keys, at, strict=True)
            client.gather([client.submit(warm_up, config, key=k, workers=[a]) for k, a in loads])
            ps.evaluate(Scorer(config), config.evaluation.every_seconds)
            crew = (
                ElasticWorkerPool(client, ps, config, record)
                if config.elastic or config.training.epochs
                else WorkerPool(client, ps, config)
            )
            faults = _faults(ps, config) if plan is None else plan
            for _, reason in obstacles(faults, cluster, config.node_names):
                raise ConfigurationError(reason)
            injector = Injector(faults, cluster, ps, record, config.seed)
            elements = sum(math.prod(spec.shape) for spec in ps.group.layout.arrays)
            workers, shards = config.training.workers, config.server.shards
            record(TrainingStarted(clock.now(), workers, shards, elements))
            if ps.saved is not None and path is not None:
                for refused in ps.saved.refused:
                    record(CheckpointRefused(clock.now(), **asdict(refused)))
                record(TrialResumed(clock.now(), path, ps.saved.updates))
            record.listeners += [crew.note, injector.note]
            with injector, record.stopping(ps, platform):
                failure = crew.work(config.time_limit)
            _audit(ps, platform, record)
    return failure


@contextmanager
def _watched(client: Client, lost: Notify | None) -> Iterator[Callable[[ParameterServer], None]]:
    """Watch the scheduler if `lost` is given; its loss raises `SchedulerLost`, not other errors.

    Yields a function to call with the parameter server when that is up.
    """
    if lost is None:
        yield lambda _: None
        return
    watch = SchedulerWatch(client, lost)
    try:
        yield watch.is_up
    except Exception as error:
        watch.end()
        if watch.lost:
            raise SchedulerLost(watch.lost) from error
        raise
    if watch.lost:
        raise SchedulerLost(watch.lost)


def _server(
    trial: Trial, cluster: Cluster, folder: Path, on_event: Sink, path: str | None
) -> ParameterServer:
    config = trial.config
    timings = Timings(lease=config.server.lease, patience=config.server.patience)
    if path is not None:
        return ParameterServer.resume(
            cluster.client,
            path,
            on_event=on_event,
            timings=timings,
            seats=cluster.seats,
            labels=_labels(trial),
            on_loss="ignore",  # losses are what is measured: they are in the record
            transport=config.server.transport,
        )
    # On virtual time they are on a virtual disk, and a record is the same in any folder.
    virtual = config.cluster.kind == "virtual"
    checkpoints = CHECKPOINTS if virtual else str((folder / CHECKPOINTS).absolute())
    return ParameterServer(
        cluster.client,
        initial(config),
        shards=config.server.shards,
        servers=config.servers,
        optimizer=config.optimizer.build(),
        consistency=config.consistency.build(),
        recovery=with_checkpoint_path(config.recovery.build(), checkpoints),
        on_event=on_event,
        timings=timings,
        about=settings(trial, {}),
        filters=built(config.filters),
        pull_filters=built(config.pull_filters),
        seats=cluster.seats,
        labels=_labels(trial),
        on_loss="ignore",
        transport=config.server.transport,
        placement=config.server.placement.build(),
    )


def _labels(trial: Trial) -> dict[str, str]:
    return {"experiment": trial.experiment, "trial": trial.name}


def _faults(ps: ParameterServer, config: TrialConfig) -> FaultPlan:
    """The fault plan, but for what lies before the point from which the trial resumes."""
    plan, saved = config.fault_plan, ps.saved
    if saved is None:
        return plan
    # Only plans whose past is known resume (see `flows.execution.attempt.can_resume`).
    moments = ((fault, fault.when) for fault in plan)
    return tuple(f for f, w in moments if isinstance(w, AtUpdates) and w.updates > saved.updates)


def _audit(ps: ParameterServer, platform: Platform, record: _Recorder) -> None:
    """Record what each shard has applied.

    One that moves, or is promoted, does not answer at that moment: it is asked again, for as long
    as a call may take. One that has no replica is not waited for.
    """
    until = platform.clock.monotonic() + ps.group.timings.call
    while True:
        now, views, replies = record.clock.now(), ps.table().views, ps.audit()
        answers = list(zip(views, replies, strict=True))
        moving = any(reply is None and view.chain for view, reply in answers)
        if not moving or platform.clock.monotonic() > until:
            break
        platform.sleep(ps.group.timings.retry)
    for view, reply in answers:
        if reply is not None:
            batches = sum(applied.batches for applied in reply.batches.values())
            state = reply.node, reply.version, reply.applied, reply.duplicates, batches
            record(Audited(now, view.shard, view.epoch, *state))


class _Replacing:
    """Replaces nodes that leave, or are lost without any fault; a context manager with a thread.

    A node that is about to leave is replaced at once, so that its state can move. A lost node, such
    as a job that was cancelled, is replaced so that the training continues, unless a fault has
    struck it: then the fault plan decides whether it is replaced.
    """

    def __init__(self, cluster: Cluster, notify: Notify) -> None:
        self._cluster = cluster
        self._notify = notify
        self._platform = platform_of(cluster.client)
        self._leaving: deque[str] = deque()
        self._news = self._platform.flag()
        self._struck: set[str] = set()
        self._replaced: set[str] = set()
        self._missed: dict[str, float] = {}
        self._over = self._platform.flag()
        self._running: Running

    def __enter__(self) -> _Replacing:
        self._running = self._platform.start(self._look, "dps-replacing")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._news.set()
        self._running.join()

    def note(self, event: Event) -> None:
        """Take note of an event: a node is to leave, or was struck. Called in any thread."""
        if isinstance(event, NodeLeaving):
            self._leaving.append(event.node)
            self._news.set()
        elif isinstance(event, Killed):
            self._struck.add(event.node)

    def _look(self) -> None:
        while not self._over.is_set():
            self._news.wait(LOOK_SECONDS)
            self._news = self._platform.flag()
            while self._leaving:
                self._replace(self._leaving.popleft())
            for name in self._lost():
                self._replace(name)

    def _lost(self) -> list[str]:
        """The nodes that were lost long enough ago to know that no fault has struck them."""
        now = self._platform.clock.monotonic()
        known = [name for name in self._cluster.pids if role_of(name) in NODE_ROLES]
        there = [name for name in known if name not in self._replaced | self._struck]
        for name in there:
            if self._cluster.gone(name, 0.0):
                self._missed.setdefault(name, now)
        return [n for n in there if now - self._missed.get(n, now) > PROOF_SECONDS]

    def _replace(self, node: str) -> None:
        if node in self._replaced:
            return
        self._replaced.add(node)
        name = replacement(node)
        if name in self._cluster.pids:
            return  # a fault plan has already replaced it
        try:
            self._cluster.start(replace(self._cluster.spec(node), name=name))
        except DpsError as error:
            self._notify(f"warning: {node} cannot be replaced: {error}")
