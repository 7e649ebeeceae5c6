"""The assignment of a trial's gradients to workers, also after the loss of a worker or its node.

Every worker has a share: a span of its order of batches. If a worker is lost before its share
is done, a new node that joins continues the share from the state of the shards. If none joins, the
remaining workers finish their shares, then divide the missing gradients, each in its order. So
every trial that ends has computed all of its gradients.

Workers that stop together have no shares: each goes through its order of batches until it sees
that the shards have all updates of the trial. Then the others are asked to leave, so that no worker
continues to compute alone, even if updates are lost after that.

Where servers and workers are added and removed, there are no shares either: the current workers
compute until the shards have enough gradients, then all are asked to leave. That takes a moment, in
which a few more gradients may be computed. A worker that leaves with its node is replaced as soon
as a node is free. Leased batches work in the same way; in addition, lost workers are replaced, and
all workers end when each batch is applied.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial

from distributed import Client, Future, KilledWorker

from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.platform import platform_of
from dps.errors import CapacityError, DpsError
from dps.events import Event, Sink, WorkerJoined
from dps.faults.injector import Progress
from flows.config.experiment import TrialConfig
from flows.config.settings import ChangeSection
from flows.execution.training import train
from flows.records.events import Rescaled

LOOK_SECONDS = 0.05
RESULT_SECONDS = 2.0
CHANGE_SECONDS = 0.02  # between two looks at how far an elastic trial has come


def shares_of(updates: int, workers: int, done: Mapping[str, int]) -> dict[str, range]:
    """Divide a number of gradients evenly; `done` are those that each worker computed before."""
    each, rest = divmod(updates, workers)
    names = [f"worker-{index}" for index in range(workers)]
    ends = {name: each + (index < rest) for index, name in enumerate(names)}
    return {name: range(min(done.get(name, 0), end), end) for name, end in ends.items()}


class _Pool:
    def __init__(self, client: Client, ps: ParameterServer, config: TrialConfig) -> None:
        self._client = client
        self._platform = platform_of(client)
        self._clock = self._platform.clock
        self._ps = ps
        self._training = config.training
        self._train = partial(train, config)
        self._running: dict[str, Future] = {}

    def note(self, event: Event) -> None:
        """Take note of an event of the group. Called in any thread."""

    def _overdue(self, limit: float, rest: str = "") -> str:
        return (
            f"the training did not end within the time limit of {limit:g} s (time_limit; real "
            f"nodes take longer on a busy machine){rest}"
        )


class WorkerPool(_Pool):
    """The workers of one trial, each with its share."""

    def __init__(self, client: Client, ps: ParameterServer, config: TrialConfig) -> None:
        super().__init__(client, ps, config)
        # What is in the state that the trial resumes from.
        tables = [state.workers for state in ps.saved.states] if ps.saved is not None else []
        done = {
            name: min(table[name].applied if name in table else 0 for table in tables)
            for name in {name for table in tables for name in table}
        }
        self._together = config.stops_together
        updates, workers = self._training.updates, self._training.workers
        self._shares = shares_of(updates, workers, done)
        if self._together:
            self._shares = {n: range(done.get(n, 0), sys.maxsize) for n in self._shares}
        self._over = False
        self._gone: list[str] = []
        self._places: dict[str, str] = {}
        self._first: set[str] = set()

    def note(self, event: Event) -> None:
        """Record from an event of the group which worker is on which node. Thread-safe."""
        if isinstance(event, WorkerJoined):
            self._places[event.worker] = event.node

    def work(self, limit: float) -> str | None:
        """Run workers until all shares are computed; return why that failed, or None."""
        until = self._clock.monotonic() + limit
        self._first = set(self._nodes())
        futures = self._ps.run(partial(self._train, dict(self._shares)), workers=len(self._shares))
        self._running = dict(zip(self._shares, futures, strict=True))
        while self._running or self._gone:
            if self._clock.monotonic() >= until:
                lost = ", ".join(sorted(self._gone))
                return self._overdue(limit, f"; no worker replaced {lost}" * bool(lost))
            self._wait(until)
            if (failure := self._look()) is not None:
                return failure
            if self._gone:
                self._hand_over()
        return None

    def _wait(self, until: float) -> None:
        """Wait for a worker that ends; while one is gone, only until it is time to look again."""
        left = max(0.0, until - self._clock.monotonic())
        if self._gone:
            left = min(left, LOOK_SECONDS)
        if not self._running:
            self._platform.sleep(left)
            return
        self._platform.wait(self._client, list(self._running.values()), left)

    def _look(self) -> str | None:
        """See which workers have ended, and how; return why the training failed, or None."""
        for name, future in list(self._running.items()):
            if not future.done():
                continue
            del self._running[name]
            error = future.exception() if future.status == "error" else None
            if isinstance(error, KilledWorker):
                self._gone.append(name)
            elif error is not None:
                return f"{type(error).__name__}: {error}"
            elif self._together:
                if not _saw_the_end(future):
                    self._gone.append(name)  # its node is to leave
                elif not self._over:
                    self._over = True
                    for other in self._running:
                        self._ps.remove_worker(other)
            elif self._may_have_left(name):
                self._gone.append(name)  # though it may have been done just then
        if self._over:
            self._gone.clear()
        return None

    def _may_have_left(self, name: str) -> bool:
        """Whether a worker may have ended because its node is to leave, if that is known yet."""
        leaving, place = self._ps.leaving, self._places.get(name)
        return place in leaving if place is not None else bool(leaving)

    def _hand_over(self) -> None:
        """Give the shares of workers that are gone to free nodes or workers."""
        done = self._applied()
        if done is None:
            return  # a shard is down: its updates are known when it is back
        for name in list(self._gone):
            share = self._shares[name]
            self._shares[name] = range(max(share.start, done.get(name, 0)), share.stop)
            if not self._shares[name]:
                self._gone.remove(name)
        present = self._nodes()
        for name, node in zip(list(self._gone), self._free(present), strict=False):
            self._gone.remove(name)
            self._start(name, node)
        if self._gone and not self._running and not self._together:
            self._divide(present.keys())

    def _free(self, present: Mapping[str, int]) -> list[str]:
        """Nodes that have joined since the start, each as often as it has threads to spare."""
        taken = Counter(self._places.values())
        fresh = sorted(present.keys() - self._first)
        return [node for node in fresh for _ in range(present[node] - taken[node])]

    def _divide(self, present: Collection[str]) -> None:
        """Make the remaining workers compute what is missing, each in its order."""
        left = [name for name, node in self._places.items() if node in present]
        left = sorted(set(left) - set(self._gone))
        if not left:
            return
        missing = sum(len(self._shares.pop(name)) for name in self._gone)
        self._gone.clear()
        each, rest = divmod(missing, len(left))
        for index, name in enumerate(left[:missing]):
            end = self._shares[name].stop
            self._shares[name] = range(end, end + each + (index < rest))
            self._start(name, self._places[name])

    def _start(self, name: str, node: str) -> None:
        self._places[name] = node
        share = partial(self._train, {name: self._shares[name]})
        self._running[name] = self._ps.run_again(share, name, node)

    def _applied(self) -> dict[str, int] | None:
        """How many gradients of each worker all shards have; None while one does not answer."""
        replies = self._ps.audit()
        tables = [reply.applied for reply in replies if reply is not None]
        if len(tables) < len(replies):
            return None
        return {name: min(t.get(name, 0) for t in tables) for name in self._shares}

    def _nodes(self) -> dict[str, int]:
        alive = self._client.sync(self._client.scheduler.identity, n_workers=-1)["workers"]
        nodes = [node for node in self._ps.nodes if node.role == "worker"]
        there = [node for node in nodes if node.name not in self._ps.leaving]
        return {node.name: node.threads for node in there if node.address in alive}


def _saw_the_end(future: Future) -> bool:
    """Whether an ended worker had seen all updates; False if its result is no longer available."""
    try:
        return bool(future.result(RESULT_SECONDS))
    except (TimeoutError, CancelledError, KilledWorker):
        return False


class ElasticWorkerPool(_Pool):
    """The workers of one trial in which workers join and leave, or lease their batches."""

    def __init__(
        self, client: Client, ps: ParameterServer, config: TrialConfig, emit: Sink
    ) -> None:
        super().__init__(client, ps, config)
        endless: defaultdict[str, range] = defaultdict(partial(range, self._training.updates))
        self._loop = partial(self._train, endless)
        self._leased = self._training.leases(config.seed)
        self._left = list(config.elastic)
        self._emit = emit
        self._progress = Progress(ps.audit, self._platform)
        self._going: dict[str, Future] = {}
        self._hired = 0
        self._owed = 0
        self._began = 0.0

    def work(self, limit: float) -> str | None:
        """Run changing workers until all gradients are computed; return why it failed, or None."""
        moments = [change.at_updates for change in self._left if change.at_updates]
        self._progress.expect([*moments, self._training.updates])
        self._progress.begin()
        try:
            self._began = self._clock.monotonic()
            self._have(self._training.workers)
            return self._until_enough(limit) or self._until_all_left(limit)
        except DpsError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self._progress.end()

    def _until_enough(self, limit: float) -> str | None:
        while (updates := self._progress.updates) < self._training.updates:
            seconds = self._clock.monotonic() - self._began
            if seconds > limit:
                return self._overdue(limit)
            if (failure := self._look()) is not None:
                return failure
            with suppress(CapacityError):  # no room yet for those whose nodes have left
                while self._owed:
                    self._hire()
                    self._owed -= 1
            if self._left and self._left[0].is_due(updates, seconds):
                self._carry_out(self._left.pop(0), updates)
            else:
                self._platform.sleep(CHANGE_SECONDS)
        return None

    def _until_all_left(self, limit: float) -> str | None:
        self._have(0)
        if not self._gone(limit - (self._clock.monotonic() - self._began)):
            return f"leaving workers did not end within the time limit of {limit:g} s"
        return self._look()

    def _carry_out(self, change: ChangeSection, updates: int) -> None:
        self._emit(Rescaled(self._clock.now(), change.servers, change.workers, updates))
        if change.servers is not None:
            self._ps.scale(change.servers)
        if change.workers is not None:
            self._have(change.workers)

    def _have(self, workers: int) -> None:
        """Start workers, or ask the last ones to leave, until there are this many."""
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
        if self._leased and not self._hired:
            (future,) = self._ps.run(self._loop, workers=1, **self._leased)
        else:
            future = self._ps.add_worker(self._loop)
        self._running[f"worker-{self._hired}"] = future
        self._hired += 1

    def _gone(self, seconds: float) -> bool:
        return self._platform.wait(self._client, list(self._going.values()), seconds, every=True)

    def _look(self) -> str | None:
        """See which workers have ended, and how; return why the training failed, or None."""
        for crew in (self._running, self._going):
            for name, future in list(crew.items()):
                if not future.done():
                    continue
                del crew[name]
                error = future.exception() if future.status == "error" else None
                if error is not None and not isinstance(error, KilledWorker):
                    return f"{type(error).__name__}: {error}"
                if crew is self._running:
                    self._owed += self._is_replaced(future)
        there = self._running or self._going or self._owed
        if there or self._progress.look() >= self._training.updates:
            return None
        if not self._leased:
            return "no worker is left"
        self._owed = 1  # a shard was restored after the last batch
        return None

    def _is_replaced(self, future: Future) -> bool:
        """Whether another worker is to take the place of one that has ended."""
        if future.status == "error":
            return bool(self._leased)
        return not (self._leased and _saw_the_end(future))
