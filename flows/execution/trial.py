"""One trial, from fresh processes to the last event. Start reading here: it names every layer.

A trial opens a cluster (processes on this machine, unless its configuration says otherwise), brings
up a parameter server on it, the workers, an evaluator on a node of its own, and an injector that
carries out the fault plan. Everything that happens is an event, and the events are all that a trial
leaves behind.
"""

from __future__ import annotations

import logging
import math
import os
import traceback
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
from distributed import Client
from distributed.client import FutureCancelledError, FuturesCancelledError

from dps.chaos.feasible import obstacles
from dps.chaos.injector import Injector
from dps.cluster.backends.base import Cluster
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec, resource_of
from dps.cluster.node.pipeline import Pipeline
from dps.cluster.node.worker import Worker
from dps.cluster.platform import Flag, Platform, platform_of
from dps.cluster.supervision.watch import SchedulerWatch
from dps.core.credentials import masked
from dps.core.faults.plan import AtUpdates, FaultPlan
from dps.errors import ConfigurationError, DpsError, SchedulerLost, StoreUnavailable
from dps.events import (
    Audited,
    CheckpointRefused,
    DashboardServed,
    Event,
    FaultMissed,
    LoadMeasured,
    Sink,
    TrainingStarted,
    TrialEnded,
    TrialResumed,
    TrialStarted,
)
from dps.protocol.executor import available_cores
from dps.protocol.recovery import with_checkpoint_path
from dps.protocol.timings import Timings
from dps.protocol.transport import Clock
from flows.config.experiment import TrialConfig
from flows.config.plugins import distributions
from flows.config.trials import Trial
from flows.config.workload import DatasetSection, workload_of
from flows.execution.attempt import versions
from flows.execution.elastic_workers import ElasticWorkerPool
from flows.execution.emulation import durations, part_of
from flows.execution.preload import needs_torch, preload_of
from flows.execution.replacement import Replacing
from flows.execution.resume import CHECKPOINTS
from flows.execution.workers import WorkerPool, endless_shares, shares_of
from flows.files import open_own
from flows.records.log import LOG_FILE, TrialLog
from flows.records.record import EVENTS_FILE, EventWriter, without_secrets
from flows.records.settings import settings
from flows.workloads import (
    Dataset,
    Workload,
    batches,
)
from flows.workloads.base import Predicts
from flows.workloads.losses import auc, rmse

LOST = "scheduler-connection-lost"  # as Dask says why futures are cancelled
TRACEBACK_FILE = "traceback.txt"
Told = Callable[[str], None]
ON_LOSS = "ignore"  # what is lost is what is measured: it is in the record


def run_trial(
    trial: Trial,
    folder: Path,
    sink: Sink,
    path: str | None = None,
    circumstances: Mapping[str, int] | None = None,
    tell: Told = lambda _: None,
    plan: FaultPlan | None = None,
    lost: Told | None = None,
) -> None:
    """Run one trial and record it in `folder`.

    Parameters
    ----------
    trial
        What to run.
    folder
        Gets `events.jsonl`, `trial.log`, and the trial's checkpoints if it writes any.
    sink
        Is called with every event as well, from another thread.
    path
        Checkpoints of this trial to go on from; None: from its start.
    circumstances
        How it is run, as far as its figures do not depend on it: see
        `flows.execution.attempt.Attempt`.
    tell
        Is told what may interest who watches the trial, such as the address of Dask's dashboard.
    plan
        The faults, if not those that follow from the configuration: see `flows.execution.replay`.
    lost
        Is told how, when the Dask scheduler that was started for the trial is lost: as soon as that
        is known, in another thread, and again before this returns. The record has no end then, so
        that the trial can be gone on with. None: it fails.

    Notes
    -----
    The record ends with `TrialEnded` in any other case, but for an interruption
    (`KeyboardInterrupt`): then it just stops, and the processes are ended before the interruption
    goes on. What nobody foresaw fails the trial as well, and leaves its traceback beside the
    record. Where an event cannot be written, the training is stopped: nothing trains unrecorded.

    Raises
    ------
    StoreUnavailable
        Not even the end can be recorded, or nothing at all.
    """
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # a lost node is no news here
    clock = _RecordClock(trial.config.cluster.clock)
    missed: list[FaultMissed] = []
    labels = _labels(trial)
    unrecorded = _Alarm()
    with EventWriter(folder / EVENTS_FILE) as write, TrialLog(folder / LOG_FILE, labels) as log:

        def record(event: Event) -> None:
            event = without_secrets(event)
            if isinstance(event, FaultMissed):
                missed.append(event)
            try:
                write(event)
            except StoreUnavailable:  # it is the reason why the trial fails
                unrecorded.set()
            log(event)
            sink(event)

        told = settings(trial, circumstances or {})
        software = versions(needs_torch(trial.config), distributions(trial.config))
        record(TrialStarted(clock.now(), trial.name, told, software))
        _measure_load(trial.config, clock, record)
        try:
            failure = _train(trial, folder, record, path, tell, plan, lost, unrecorded, clock)
        except SchedulerLost as error:
            if lost is not None and write.failure is None:
                lost(str(error))
                return
            failure = reason_of(error, folder)
        except Exception as error:  # noqa: BLE001 (a defect in one trial must not stop the others)
            failure = reason_of(error, folder)
        if write.failure is not None:
            failure = f"StoreUnavailable: {write.failure}"
        status, reason = "valid", ""
        if failure is not None:
            status, reason = "failed", failure
        elif missed:
            reason = "; ".join(f"fault on {m.target}: {m.reason}" for m in missed)
            status = "invalid"
        if write.failure is None:
            _measure_load(trial.config, clock, record)
        ended = without_secrets(TrialEnded(clock.now(), status, reason))
        log(ended)
        sink(ended)
        write.end(ended)


def _measure_load(config: TrialConfig, clock: Clock, record: Sink) -> None:
    if config.cluster.kind != "virtual":
        record(LoadMeasured(clock.now(), os.getloadavg()[0], available_cores()))


class _RecordClock:
    """The clock of a record: that of the cluster, from when there is one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def go_by(self, clock: Clock) -> None:
        """Tell the time by another clock from now on."""
        self._clock = clock

    def now(self) -> float:
        """Seconds since the Unix epoch."""
        return self._clock.now()

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back."""
        return self._clock.monotonic()


class _Alarm:
    """Raised when an event cannot be recorded, perhaps before anybody waits for it. Thread-safe."""

    def __init__(self) -> None:
        self._raised = False
        self._flag: Flag | None = None

    def set(self) -> None:
        """Raise it."""
        self._raised = True
        if self._flag is not None:
            self._flag.set()

    def wake(self, flag: Flag) -> None:
        """Set a flag when it is raised, or at once if it was."""
        self._flag = flag
        if self._raised:
            flag.set()


def reason_of(error: Exception, folder: Path) -> str:
    """Say why a trial failed; what nobody foresaw leaves its traceback beside the record."""
    if isinstance(error, FutureCancelledError | FuturesCancelledError) and LOST in str(error):
        return "Dask's scheduler was lost, and the coordinator with it"
    reason = masked(f"{type(error).__name__}: {error}")
    if isinstance(error, DpsError | OSError):
        return reason
    text = masked("".join(traceback.format_exception(error)))
    try:
        with open_own(folder / TRACEBACK_FILE, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as away:
        return f"{reason} (unforeseen; its traceback could not be written: {away.strerror})"
    return f"{reason} (unforeseen; see {TRACEBACK_FILE} beside the record)"


def _train(
    trial: Trial,
    folder: Path,
    record: Sink,
    path: str | None,
    tell: Told,
    plan: FaultPlan | None,
    lost: Told | None,
    unrecorded: _Alarm,
    clock: _RecordClock,
) -> str | None:
    """Train under the fault plan; return why it failed, or None."""
    config = trial.config
    with config.cluster.open(nodes(config), preload_of(config), tell, config.seed) as cluster:
        platform = platform_of(cluster.client)
        clock.go_by(platform.clock)
        if cluster.dashboard is not None:
            record(DashboardServed(clock.now(), cluster.dashboard))
        _tell_about(cluster, tell)
        watched = _watched(cluster.client, lost if config.cluster.starts_scheduler else None)
        replacing = Replacing(cluster, tell)
        notify: list[Sink] = [replacing.note]

        def on_event(event: Event) -> None:
            record(event)
            for note in notify:
                note(event)

        with (
            watched as is_up,
            replacing,
            _served(trial, cluster, folder, on_event, path) as ps,
        ):
            is_up(ps)
            _make_ready(cluster.client, ps, config)
            ps.evaluate(Scorer(config), config.evaluation.every_seconds)
            crew = _crew(cluster.client, ps, config, record)
            faults = _faults(ps, config) if plan is None else plan
            for _, reason in obstacles(faults, cluster, config.node_names):
                raise ConfigurationError(reason)
            injector = Injector(faults, cluster, ps, clock, on_event, config.seed)
            elements = sum(math.prod(spec.shape) for spec in ps.group.layout.arrays)
            record(
                TrainingStarted(
                    clock.now(), config.training.workers, config.server.shards, elements
                )
            )
            if ps.saved is not None and path is not None:
                for refused in ps.saved.refused:
                    record(CheckpointRefused(clock.now(), **asdict(refused)))
                record(TrialResumed(clock.now(), path, ps.saved.updates))
            notify += [crew.note, injector.note]
            with injector, _stopped_by(unrecorded, ps, platform):
                failure = crew.work(config.time_limit)
            _audit(ps, platform, clock, record)
    return failure


@contextmanager
def _watched(client: Client, lost: Told | None) -> Iterator[Callable[[ParameterServer], None]]:
    """Watch the scheduler, if somebody wants to know of its loss, and say that this is the reason.

    Yields what is to be told of the parameter server when that is up.

    Raises
    ------
    SchedulerLost
        It was lost, whatever else has come of that.
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


@contextmanager
def _stopped_by(unrecorded: _Alarm, ps: ParameterServer, platform: Platform) -> Iterator[None]:
    """Stop the training as soon as an event cannot be recorded."""
    over, raised = False, platform.flag()

    def stop() -> None:
        raised.wait()
        if not over:
            ps.stop()

    running = platform.start(stop, "dps-unrecorded")
    unrecorded.wake(raised)
    try:
        yield
    finally:
        over = True
        raised.set()  # that ends it
        running.join()


def _tell_about(cluster: Cluster, tell: Told) -> None:
    if cluster.dashboard is not None:
        tell(masked(f"Dask dashboard: {cluster.dashboard}"))
    for note in cluster.notes:
        tell(masked(f"warning: {note}"))


def _make_ready(client: Client, ps: ParameterServer, config: TrialConfig) -> None:
    """Have every worker's node load what it needs, which is no part of the training.

    It takes seconds of large data, and more of them for whoever comes first on a machine.
    """
    at = [node.address for node in ps.nodes if node.role == "worker"]
    keys = [f"dps-warm-up-{uuid.uuid4().hex[:8]}" for _ in at]
    client.gather(
        [client.submit(warm_up, config, key=k, workers=[a]) for k, a in zip(keys, at, strict=True)]
    )


@contextmanager
def _served(
    trial: Trial, cluster: Cluster, folder: Path, on_event: Sink, path: str | None
) -> Iterator[ParameterServer]:
    """Bring the parameter server up, and down again without a last checkpoint.

    Nobody goes on from a trial that is over, and what it writes is counted.
    """
    ps = _server(trial, cluster, folder, on_event, path)
    try:
        yield ps
    finally:
        ps.close(checkpoint=False)


def _server(
    trial: Trial, cluster: Cluster, folder: Path, on_event: Sink, path: str | None
) -> ParameterServer:
    client, seats = cluster.client, cluster.seats
    config = trial.config
    timings = Timings(lease=config.server.lease, patience=config.server.patience)
    labels = _labels(trial)
    if path is not None:
        return ParameterServer.resume(
            client,
            path,
            on_event=on_event,
            timings=timings,
            seats=seats,
            labels=labels,
            on_loss=ON_LOSS,
            transport=config.server.transport,
        )
    # On virtual time they are on a disk of their own, and a record is the same in any folder.
    virtual = config.cluster.kind == "virtual"
    checkpoints = CHECKPOINTS if virtual else str((folder / CHECKPOINTS).absolute())
    return ParameterServer(
        client,
        initial(config),
        shards=config.server.shards,
        servers=config.servers,
        optimizer=config.build_optimizer(),
        consistency=config.build_consistency(),
        recovery=with_checkpoint_path(config.build_recovery(), checkpoints),
        on_event=on_event,
        timings=timings,
        about=settings(trial, {}),
        filters=config.build_filters(),
        pull_filters=config.build_pull_filters(),
        seats=seats,
        labels=labels,
        on_loss=ON_LOSS,
        transport=config.server.transport,
        placement=config.server.placement.build(),
    )


def _labels(trial: Trial) -> dict[str, str]:
    """What the trial's metrics and the lines of its logs are known by."""
    return {"experiment": trial.experiment, "trial": trial.name}


def initial(config: TrialConfig) -> dict[str, np.ndarray]:
    """The values that the model starts from; they depend on the seed alone."""
    return workload_of(config).initial(np.random.default_rng([config.seed, 0]))


def _shares(ps: ParameterServer, config: TrialConfig) -> dict[str, range]:
    """What each worker is to compute, but for what is in the state that the trial goes on from.

    Workers that stop together have no share of their own: each has all of its order of batches.
    """
    tables = [state.workers for state in ps.saved.states] if ps.saved is not None else []
    done = {
        name: min(table[name].applied if name in table else 0 for table in tables)
        for name in {name for table in tables for name in table}
    }
    if config.stops_together:
        return endless_shares(config.training.workers, done)
    return shares_of(config.training.updates, config.training.workers, done)


def _crew(
    client: Client, ps: ParameterServer, config: TrialConfig, record: Sink
) -> WorkerPool | ElasticWorkerPool:
    """The workers, with shares of their own unless they come and go."""
    training, loop = config.training, partial(train, config)
    if not config.elastic:
        return WorkerPool(client, ps, loop, _shares(ps, config), config.stops_together)
    each = partial(loop, defaultdict(partial(range, training.updates)))
    return ElasticWorkerPool(
        client,
        ps,
        each,
        config.elastic,
        training.workers,
        training.updates,
        platform_of(client).clock,
        record,
    )


def _faults(ps: ParameterServer, config: TrialConfig) -> FaultPlan:
    """The fault plan, but for what lies before the point from which the trial goes on."""
    plan, saved = config.build_faults(), ps.saved
    if saved is None:
        return plan
    # Only plans of which it is known what is behind go on (see `flows.execution.resume`).
    moments = ((fault, fault.when) for fault in plan)
    return tuple(f for f, w in moments if isinstance(w, AtUpdates) and w.updates > saved.updates)


def _audit(ps: ParameterServer, platform: Platform, clock: _RecordClock, record: Sink) -> None:
    """Record what each shard has applied.

    One that moves, or is promoted, does not answer at that moment: it is asked again, for as long
    as a call may take. One that has no replica is not waited for.
    """
    until = platform.clock.monotonic() + ps.group.timings.call
    while True:
        now, views, replies = clock.now(), ps.table().views, ps.audit()
        found = list(zip(views, replies, strict=True))
        moving = any(reply is None and view.chain for view, reply in found)
        if not moving or platform.clock.monotonic() > until:
            break
        platform.sleep(ps.group.timings.retry)
    for view, reply in found:
        if reply is not None:
            record(
                Audited(
                    now,
                    view.shard,
                    view.epoch,
                    reply.node,
                    reply.version,
                    reply.applied,
                    reply.duplicates,
                )
            )


# -- what runs on the nodes ----------------------------------------------------------------------


def warm_up(config: TrialConfig) -> None:
    """Load the data and compute a gradient, so that the first of the training is like others."""
    data, first = _training_data(config.dataset), slice(config.training.batch_size)
    workload_of(config).gradient(initial(config), data.x_train[first], data.y_train[first])


@lru_cache(maxsize=1)
def _training_data(dataset: DatasetSection) -> Dataset:
    return dataset.load("train")


def train(config: TrialConfig, shares: Mapping[str, range], worker: Worker) -> bool:
    """One worker's loop, the same for every strategy: gradient, push and pull, report.

    `shares` says which of its batches each worker computes, in their order; one that is asked to
    leave does not compute the rest. What it reports as computing is the gradient and the emulated
    rest of it; the time until the next gradient is spent waiting for the server, or for others. It
    computes on while so many updates are on their way as `training.ahead` says.

    Returns whether it has seen that the shards have all updates, where workers stop together: that
    is told by the weights that it was given last, so each of them computes one gradient more than
    is needed at most, and as many as it may be ahead.
    """
    workload, training = workload_of(config), config.training
    data = _training_data(config.dataset)
    share, number = shares[worker.name], int(worker.name.removeprefix("worker-"))
    rng = np.random.default_rng([config.seed, 1 + number])
    rows = part_of(training, data.y_train, number)
    order = batches(rng, len(rows), training.batch_size)
    times = durations(training, config.seed, number, config.cluster.gradient)
    deque(islice(zip(order, times, strict=True), share.start), maxlen=0)
    goal = training.updates if config.stops_together else math.inf
    with Pipeline(worker, training.ahead) as pipeline:
        for _ in share:
            if worker.read_point is not None and worker.read_point.updates >= goal:
                return True
            if worker.leaving:
                return False
            began = worker.now()
            batch = rows[next(order)]
            x, y = data.x_train[batch], data.y_train[batch]
            loss, gradients = workload.gradient(dict(pipeline.weights), x, y)
            spent = worker.now() - began
            worker.sleep(max(0.0, next(times) - spent))
            computed = worker.now() - began
            pipeline.push_pull(gradients)
            worker.report(loss=loss, compute_seconds=computed)
    return False


class Scorer:
    """Scores weights on the test set, which it loads when it is first called.

    Where the objective is asked for, it loads all training data as well.
    """

    def __init__(self, config: TrialConfig) -> None:
        self._config = config
        self._objective = config.build_objective()

    def __call__(
        self, weights: Mapping[str, np.ndarray]
    ) -> tuple[float, float] | tuple[float, float, float, float]:
        """Return loss and score, and objective and stationarity if they are asked for."""
        params, data = dict(weights), self._data
        loss, score = self._loss_and_score(params)
        if self._objective is None:
            return loss, score
        return (loss, score, *self._objective.score(params, data.x_train, data.y_train))

    def _loss_and_score(self, params: dict[str, np.ndarray]) -> tuple[float, float]:
        metric, data = self._config.evaluation.metric, self._data
        if metric not in ("auc", "rmse"):
            loss, score = self._workload.evaluate(params, data.x_test, data.y_test)
            return loss, loss if metric == "loss" else score
        # Of a kind that predicts: the configuration was checked.
        workload, parts = cast(Predicts, self._workload), list[np.ndarray]()
        loss, _ = workload.evaluate(params, data.x_test, data.y_test, parts)
        found = np.concatenate(parts)
        if metric == "auc":
            return loss, auc(found[:, 1] - found[:, 0], data.y_test)
        return loss, data.target_scale * rmse(found, data.y_test)

    @cached_property
    def _workload(self) -> Workload:
        return workload_of(self._config)

    @cached_property
    def _data(self) -> Dataset:
        return self._config.dataset.load("test" if self._objective is None else "both")


def nodes(config: TrialConfig) -> list[NodeSpec]:
    """The trial's nodes, each with the Dask resource that its role is known by."""
    threads = dict.fromkeys(config.worker_nodes, config.training.workers_per_node)
    return [NodeSpec(n, resource_of(n), threads.get(n, 1)) for n in config.node_names]
