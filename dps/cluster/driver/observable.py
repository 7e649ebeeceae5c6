"""What a parameter server shows of itself: its shards and workers, its history, its weights.

The part of `ParameterServer` that changes nothing in the group.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

from dps.cluster.platform import platform_of
from dps.core.ranges import argument_above_zero, brief
from dps.core.tables.row_gradients import KEYS
from dps.errors import ConfigurationError
from dps.observe.history import History
from dps.observe.progress import display
from dps.observe.tracking import MlflowRun
from dps.observe.views import (
    Listing,
    ShardView,
    TrainingView,
    WorkerView,
    missing_copies,
    overview_html,
    overview_line,
    size,
)
from dps.recovery import model_files

if TYPE_CHECKING:
    import distributed
    import pandas

    from dps.cluster.driver.connection import SchedulerConnection
    from dps.cluster.driver.inbox import Inbox
    from dps.cluster.driver.incidents import IncidentWatch
    from dps.cluster.driver.news import News
    from dps.cluster.driver.shard_hosts import ShardHosts
    from dps.cluster.driver.training_watch import TrainingWatch
    from dps.core.consistency import Consistency
    from dps.core.rules.rule import UpdateRule
    from dps.protocol.client.client import Client
    from dps.protocol.group import Group
    from dps.recovery.manifest import Saved
    from dps.recovery.strategy import Recovery

T = TypeVar("T")

LOOK_SECONDS = 0.5  # from one look at the progress to the next
ERROR_TEXT = 200  # characters of an error that are shown


class Observable(ABC):
    """What can be seen of a parameter server; it is brought up and used by `ParameterServer`."""

    group: Group
    _client: distributed.Client
    _history: History
    _inbox: Inbox
    _last_run: Sequence[str]
    _open: bool
    _runs: list[MlflowRun]
    _shard_hosts: ShardHosts
    _training: TrainingWatch
    _watch: IncidentWatch
    _news: News
    _connection: SchedulerConnection
    saved: Saved | None

    @abstractmethod
    def _read(self, what: Callable[[Client], Awaitable[T]]) -> T: ...

    @abstractmethod
    def _require_open(self) -> None: ...

    @property
    def name(self) -> str:
        """The name of the group, which its logs, metrics and checkpoints have."""
        return self.group.name

    @property
    def optimizer(self) -> UpdateRule:
        """The update rule."""
        return self.group.rule

    @property
    def consistency(self) -> Consistency:
        """The consistency model."""
        return self.group.consistency

    @property
    def recovery(self) -> Recovery:
        """What is done about losses."""
        return self.group.recovery

    @property
    def shards(self) -> Listing[ShardView]:
        """How it stands with each shard: its nodes, version, epoch and size.

        The shards are asked, for a second at most. With an asynchronous client, and when it is
        closed, this is what was known last.
        """
        self._look()
        return self._training.shards(self._shard_hosts.nodes)

    @property
    def workers(self) -> Listing[WorkerView]:
        """How it stands with each worker that was started: its clock, rate and last loss.

        The shards are asked, as for `shards`.
        """
        self._look()
        return self._training.workers()

    def history(self) -> pandas.DataFrame:
        """Return what workers reported and evaluators scored, in the order of time.

        The driver keeps it, whether there is `on_event` or not: some 500,000 numbers. When there
        are more, every other number of the longest series is left out, evenly from the first to the
        last. Numbers of a running worker arrive within `Timings.flush`. With a synchronous client,
        all that was reported before this was called is there.

        Returns
        -------
        history
            A row for each number, with the columns `time` (UTC), `source` (a worker's name, or
            "evaluator"), `incarnation` (of the worker; 0 of evaluators), `metric` (the name that it
            was reported under; "loss" and "accuracy" of evaluators), `step` (the version of the
            weights that were evaluated, or that the worker had been given last when it reported, on
            the mean of the shards; -1 before it has pulled), `value`, `report` (of a worker, its
            reports from 1 in each incarnation; 0 of evaluators) and `learning_rate`: that of an
            update of these weights, without what staleness takes off; NaN where there is none of
            all arrays, and before a worker has pulled.

        Raises
        ------
        ConfigurationError
            The package pandas is not installed.
        """
        self._catch_up()
        self._news.deliver()
        return self._history.frame()

    def progress(self, total: int | None = None) -> None:
        """Show how far the training is, until the workers have ended that run now.

        In a terminal it is a line that changes, in a notebook a piece of HTML. Below it are the
        first error of a worker that failed, shards that lack a copy, and the last failover.
        Interrupting it ends the showing, not the training. What workers return, or raise, is for
        who has their futures. If none runs, it shows at once what those of the last `run` have
        done.

        Parameters
        ----------
        total
            How many gradients these workers push in all; then there are a bar and the time left.

        Raises
        ------
        ConfigurationError
            The client is asynchronous, which cannot wait here, or `total` is no number above 0.
        """
        self._require_open()
        if self._client.asynchronous:
            raise ConfigurationError(
                "progress() waits for the workers, which an asynchronous client cannot do here; "
                "look at ps.workers instead"
            )
        if total is not None:
            argument_above_zero("total", total)
        platform = platform_of(self._client)
        known = self._training.workers()
        running = [each.worker for each in known if not each.ended]
        names = running or [each.worker for each in known if each.worker in self._last_run]
        since = min((self._training.started[name].at for name in running), default=None)
        with display() as show:
            while True:
                futures = self._training.pending(names)
                if not futures:
                    self._catch_up()
                self._look()
                self._news.deliver()
                more = {"lost": self._lost_updates, "notes": self._notes_on_progress(names)}
                show(self._training.progress(names, total, since, **more))
                if not futures:
                    return
                platform.wait(self._client, futures, LOOK_SECONDS, every=True)

    def log_to_mlflow(
        self,
        experiment: str,
        run_name: str | None = None,
        tracking_uri: str | PathLike[str] | None = None,
    ) -> str:
        """Log the training to MLflow from now on, until it is closed; return the run's id.

        The run has what was chosen as its parameters, one by one to search by them, such as
        "recovery.durability.kind"; the `history`, also of before, as its metrics, such as
        "worker-0/loss" or "evaluator/accuracy"; and each failover as a tag. Characters that MLflow
        does not take in a name become "_", with a warning. Whatever the tracking server does not
        take is left out, with a warning; the training continues.

        After `resume`, this goes on with the run that the parameter server before was logged to, if
        it is in this experiment and has this name. Parameters that the run has stay as they are.

        Parameters
        ----------
        experiment
            The name of MLflow's experiment; it is made if there is none.
        run_name
            None: "dps-" and the name of the parameter server, or whatever name the run has that is
            gone on with.
        tracking_uri
            None: where MLflow is told to, by `mlflow.set_tracking_uri` or its environment.

        Raises
        ------
        ConfigurationError
            The package mlflow is not installed, or an argument is no text.
        StoreUnavailable
            The tracking server does not make the run, or does not answer within 30 s.
        """
        self._require_open()
        tags = {f"dps.{name}": value for name, value in self.group.labels.items()}
        sizes = {"parameters": self._parameters, "shards": len(self.group.layout.shards)}
        run = MlflowRun(
            self._history,
            experiment,
            run_name,
            tracking_uri,
            params={**self._choices, **sizes},
            tags=tags,
            group=self.group.name,
            before=self.saved.run.name if self.saved is not None else None,
            warn=partial(self._news.warn, category=RuntimeWarning),
        )
        self._runs.append(run)
        self._watch.listen(run.failover)
        return run.id

    def save(self, path: str | PathLike[str]) -> None:
        """Write the weights into a folder, from which `dps.load` reads them without a cluster.

        That is a safetensors file for each shard, and a manifest with checksums. It is there whole
        or not at all: a model that was saved there before stays until this one is written. The rows
        of sparse tables are among them, the state of the optimizer is not: see `checkpoint`. Each
        shard is as it is at the moment when it is read; save when no worker runs to have all of
        them of the same update.

        Parameters
        ----------
        path
            A folder that the driver can write, or the address of one that fsspec knows.

        Raises
        ------
        StoreUnavailable
            It cannot be written.
        ConfigurationError
            The folder holds a manifest of something else, or fsspec does not know the path.
        ShardUnavailable
            A shard stayed down for too long.
        """
        layout = self.group.layout

        async def read(reader: Client) -> None:
            await reader.pull()
            arrays = reader.weights()
            rows = {
                spec.name: await reader.pull_range(spec.name, 0, KEYS) for spec in layout.tables
            }
            versions = reader.versions()
            await asyncio.to_thread(model_files.save, path, layout, arrays, rows, versions)

        return self._read(read)

    def __repr__(self) -> str:
        return overview_line(self._view(), self._facts)

    def _repr_html_(self) -> str:
        self._look()
        return overview_html(self._view(), self._facts)

    def _view(self) -> TrainingView:
        shards = self._training.shards(self._shard_hosts.nodes)
        versions = [shard.version for shard in shards if shard.version is not None]
        return TrainingView(
            self.group.name,
            "running" if self._open else "closed",
            platform_of(self._client).clock.now(),
            min(versions, default=None),
            shards=shards,
            workers=self._training.workers(),
            lost=self._lost_updates,
            notes=(*self._notes_on_losses, *missing_copies(shards)),
        )

    @property
    def _facts(self) -> dict[str, str]:
        """Arrays, tables, sizes and settings; the shards count the rows of tables, in bytes."""
        layout = self.group.layout
        return {
            "arrays": str(len(layout.arrays)),
            "tables": str(len(layout.tables)),
            "parameters": f"{self._parameters:,}",
            "size": size(sum(shard.nbytes for shard in layout.shards)),
            "shards": str(len(layout.shards)),
            **{name: brief(choice) for name, choice in self._choices.items()},
        }

    @property
    def _notes_on_losses(self) -> list[str]:
        lost, failovers = self._lost_updates, len(self._watch.failovers)
        notes = [f"{lost:,} acknowledged updates were lost: see ps.losses"] if lost else []
        many = f"{failovers} failovers" if failovers > 1 else "a failover"
        return [*notes, f"there was {many}: see ps.failovers"] if failovers else notes

    def _notes_on_progress(self, names: Sequence[str]) -> tuple[str, ...]:
        """What went wrong: the first error of these workers, missing copies, the last failover."""
        failed = self._training.failed(names)
        errors = [f"{name} failed: {_brief_error(future)}" for name, future in failed[:1]]
        missing = missing_copies(self._training.shards(self._shard_hosts.nodes))
        return (*errors, *missing, *map(str, self._watch.failovers[-1:]))

    @property
    def _choices(self) -> Mapping[str, Any]:
        group = self.group
        return {
            "optimizer": group.rule,
            "consistency": group.consistency,
            "recovery": group.recovery,
            **({"filters": group.filters} if group.filters else {}),
        }

    @property
    def _parameters(self) -> int:
        return sum(spec.size for spec in self.group.layout.arrays)

    @property
    def _can_ask(self) -> bool:
        return self._open and not (self._client.asynchronous or self._connection.closed_here)

    def _look(self) -> None:
        if self._can_ask:
            self._client.sync(self._training.look)

    def _look_for_incidents(self) -> None:
        if self._can_ask:
            self._client.sync(self._watch.look)
        self._news.deliver()

    def _catch_up(self) -> None:
        if self._can_ask:
            self._client.sync(self._inbox.catch_up, self._shard_hosts.seated)

    @property
    def _lost_updates(self) -> int:
        return sum(loss.updates for loss in self._watch.losses)

    def _endings(self) -> list[Callable[[], None]]:
        """What ends the runs of MLflow that this training is logged to; workers have ended."""
        runs, self._runs = self._runs, []
        failed = any(each.status == "failed" for each in self._training.workers())
        self._training.let_go()
        numbers = {"updates_lost": self._lost_updates, "failovers": len(self._watch.failovers)}
        return [partial(run.close, numbers, not failed) for run in runs]

    async def _end_runs(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(end) for end in self._endings()))


def _brief_error(future: Any) -> str:
    """The error of a future that failed, in a line."""
    error = future.exception()
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:ERROR_TEXT]}" if text else type(error).__name__
