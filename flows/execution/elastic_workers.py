"""The workers of a trial in which servers and workers come and go.

Nobody has a share of his own: whoever is there computes, until the shards have as many gradients as
the trial is to have. Then all are asked to leave, which takes a moment, so there may be a few more.
For each worker that has left because its node does, another one is started as soon as there is a
node for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from distributed import Client, Future, KilledWorker

from dps.chaos.progress import Progress
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.node.worker import Worker
from dps.cluster.platform import platform_of
from dps.errors import CapacityError, DpsError
from dps.events import Event, Rescaled, Sink
from dps.protocol.transport import Clock
from flows.config.base import ChangeSection
from flows.execution.workers import Unwritten, overdue

LOOK_SECONDS = 0.02


class ElasticWorkerPool:
    """The workers of one trial.

    Parameters
    ----------
    client
        That of the parameter server.
    train
        A worker's loop, which ends when the worker is asked to leave.
    changes
        What is to change, one after the other.
    workers, updates
        How many workers there are at first, and how many gradients are computed at least.
    """

    def __init__(
        self,
        client: Client,
        ps: ParameterServer,
        train: Callable[[Worker], object],
        changes: Sequence[ChangeSection],
        workers: int,
        updates: int,
        clock: Clock,
        emit: Sink,
    ) -> None:
        self._client = client
        self._platform = platform_of(client)
        self._ps = ps
        self._train = train
        self._left = list(changes)
        self._first = workers
        self._goal = updates
        self._clock = clock
        self._emit = emit
        self._progress = Progress(ps.audit, clock, self._platform)
        self._running: dict[str, Future] = {}
        self._going: dict[str, Future] = {}
        self._hired = 0
        self._owed = 0
        self._began = 0.0
        self._unwritten = Unwritten()

    def note(self, event: Event) -> None:
        """Take note of an event of the group: what became of checkpoints."""
        self._unwritten.note(event)

    def work(self, limit: float) -> str | None:
        """Have all gradients computed while things change; return why that failed, or None."""
        self._progress.expect([*(c.at_updates for c in self._left if c.at_updates), self._goal])
        self._progress.begin()
        try:
            self._began = self._platform.clock.monotonic()
            self._have(self._first)
            return self._until_enough(limit) or self._until_all_left(limit)
        except DpsError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self._progress.end()

    def _until_enough(self, limit: float) -> str | None:
        while (updates := self._progress.updates) < self._goal:
            seconds = self._platform.clock.monotonic() - self._began
            if seconds > limit:
                return f"{overdue(limit)}{self._unwritten}"
            if (failure := self._look()) is not None:
                return failure
            self._make_good()
            if self._left and self._left[0].is_due(updates, seconds):
                self._carry_out(self._left.pop(0), updates)
            else:
                self._platform.sleep(LOOK_SECONDS)
        return None

    def _until_all_left(self, limit: float) -> str | None:
        self._have(0)
        if not self._gone(limit - (self._platform.clock.monotonic() - self._began)):
            return f"workers that were asked to leave did not within the time limit of {limit:g} s"
        return self._look()

    def _carry_out(self, change: ChangeSection, updates: int) -> None:
        now = self._clock.now()
        self._emit(Rescaled(now, change.servers, change.workers, updates))
        if change.servers is not None:
            self._ps.scale(change.servers)
        if change.workers is not None:
            self._have(change.workers)

    def _have(self, workers: int) -> None:
        """Start workers, or ask those to leave that came last, until there are so many."""
        while len(self._running) > workers:
            name, future = self._running.popitem()
            self._going[name] = future
            self._ps.remove_worker(name)
        if len(self._running) < workers:
            self._gone(self._ps.group.timings.unavailable)  # their nodes are needed
        self._owed = 0
        while len(self._running) < workers:
            self._hire()

    def _hire(self) -> None:
        self._running[f"worker-{self._hired}"] = self._ps.add_worker(self._train)
        self._hired += 1

    def _make_good(self) -> None:
        """Start workers in place of those that have left with their nodes, if there is room."""
        with suppress(CapacityError):
            while self._owed:
                self._hire()
                self._owed -= 1

    def _gone(self, seconds: float) -> bool:
        """Wait until everybody has left who was asked to."""
        return self._platform.wait(self._client, list(self._going.values()), seconds, every=True)

    def _look(self) -> str | None:
        """See who has ended, and how; return why the training failed, or None."""
        for crew in (self._running, self._going):
            for name, future in list(crew.items()):
                if not future.done():
                    continue
                del crew[name]
                error = future.exception() if future.status == "error" else None
                if error is not None and not isinstance(error, KilledWorker):
                    return f"{type(error).__name__}: {error}"
                self._owed += error is None and crew is self._running
        there = self._running or self._going or self._owed
        if not there and self._progress.updates < self._goal:
            return "no worker is left"
        return None
