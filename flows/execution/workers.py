"""Who computes which gradients of a trial, also after a worker or its node is gone.

Every worker has a share: a span of its own order of batches. When a worker is gone before its share
is done, a fresh node that joins goes on with it where the shards have it; if none does, the workers
that are left divide what is missing, once they are done, and each goes on in its own order. So
every trial that ends has had all of its gradients computed.

Workers that stop together have no shares: each goes through its own order of batches until it sees
that the shards have all updates of the trial. Then the others are asked to leave, so that nobody is
left computing alone, whatever is lost after that.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError
from functools import partial

from distributed import Client, Future, KilledWorker

from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.node.worker import Worker
from dps.cluster.platform import platform_of
from dps.events import CheckpointFailed, CheckpointWritten, Event, WorkerJoined

LOOK_SECONDS = 0.05
RESULT_SECONDS = 2.0

Shares = Mapping[str, range]
Train = Callable[[Shares, Worker], bool]


def shares_of(updates: int, workers: int, done: Mapping[str, int]) -> dict[str, range]:
    """Divide so many gradients evenly; `done` says how many each worker has computed before."""
    each, rest = divmod(updates, workers)
    names = [f"worker-{index}" for index in range(workers)]
    ends = {name: each + (index < rest) for index, name in enumerate(names)}
    return {name: range(min(done.get(name, 0), end), end) for name, end in ends.items()}


def endless_shares(workers: int, done: Mapping[str, int]) -> dict[str, range]:
    """Give each worker all of its order of batches, but for what it has computed before."""
    names = (f"worker-{index}" for index in range(workers))
    return {name: range(done.get(name, 0), sys.maxsize) for name in names}


def _saw_the_end(future: Future) -> bool:
    """Whether a worker that has ended had seen all updates, as far as its node can still tell."""
    try:
        return bool(future.result(RESULT_SECONDS))
    except (TimeoutError, CancelledError, KilledWorker):
        return False


class Unwritten:
    """The shards whose last checkpoint could not be written: acks may wait for the next."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}

    def note(self, event: Event) -> None:
        """Take note of an event of the group: what became of a checkpoint."""
        if isinstance(event, CheckpointFailed):
            self._reasons[event.shard] = event.reason
        elif isinstance(event, CheckpointWritten):
            self._reasons.pop(event.shard, None)

    def __str__(self) -> str:
        # A copy, for events come from another thread. One shard tells as much as all.
        for shard, reason in sorted(self._reasons.copy().items()):
            return f"; no newer checkpoint of shard {shard}: {reason}"
        return ""


def overdue(limit: float) -> str:
    """Say that a training took longer than it may."""
    return (
        f"the training did not end within the time limit of {limit:g} s (time_limit; real nodes "
        "take longer on a busy machine)"
    )


class WorkerPool:
    """The workers of one trial.

    Parameters
    ----------
    client
        That of the parameter server.
    train
        Computes a worker's share, which is given by the worker's name. Returns whether it has seen
        that the shards have all updates, where workers stop together.
    together
        Whether they do.
    """

    def __init__(
        self,
        client: Client,
        ps: ParameterServer,
        train: Train,
        shares: Shares,
        together: bool = False,
    ) -> None:
        self._client = client
        self._platform = platform_of(client)
        self._ps = ps
        self._train = train
        self._shares = dict(shares)
        self._together = together
        self._over = False
        self._running: dict[str, Future] = {}
        self._gone: list[str] = []
        self._places: dict[str, str] = {}
        self._first: set[str] = set()
        self._unwritten = Unwritten()

    def note(self, event: Event) -> None:
        """Take note of an event of the group: which worker is on which node, and checkpoints."""
        self._unwritten.note(event)
        if isinstance(event, WorkerJoined):
            self._places[event.worker] = event.node

    def work(self, limit: float) -> str | None:
        """Have all shares computed; return why that failed, or None."""
        until = self._platform.clock.monotonic() + limit
        self._first = set(self._nodes())
        train = partial(self._train, dict(self._shares))
        futures = self._ps.run(train, workers=len(self._shares))
        self._running = dict(zip(self._shares, futures, strict=True))
        while self._running or self._gone:
            if self._platform.clock.monotonic() >= until:
                return overdue(limit) + self._rest
            self._wait(until)
            if (failure := self._look()) is not None:
                return failure
            if self._gone:
                self._hand_over()
        return None

    @property
    def _rest(self) -> str:
        lost = ", ".join(sorted(self._gone))
        nobody = f"; nobody was left to go on for {lost}" if lost else ""
        return f"{nobody}{self._unwritten}"

    def _wait(self, until: float) -> None:
        """Wait for a worker that ends; while one is gone, only until it is time to look again."""
        left = max(0.0, until - self._platform.clock.monotonic())
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
                    self._end_of_all()
            elif self._may_have_left(name):
                self._gone.append(name)  # though it may have been done just then
        if self._over:
            self._gone.clear()
        return None

    def _end_of_all(self) -> None:
        """Have those leave who have not seen yet that the shards have all updates."""
        self._over = True
        for name in self._running:
            self._ps.remove_worker(name)

    def _may_have_left(self, name: str) -> bool:
        """Whether a worker may have ended because its node is to leave, if that is known yet."""
        leaving, place = self._ps.leaving, self._places.get(name)
        return place in leaving if place is not None else bool(leaving)

    def _hand_over(self) -> None:
        """Give the shares of workers that are gone to who is free for them."""
        done = self._applied()
        if done is None:
            return  # a shard is down: what it holds is known when it is back
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
        """Have the workers that are left compute what is missing, each in its own order."""
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
        train = partial(self._train, {name: self._shares[name]})
        self._running[name] = self._ps.run_again(train, name, node)

    def _applied(self) -> dict[str, int] | None:
        """How many gradients of each worker all shards have; None while one does not answer."""
        replies = self._ps.audit()
        tables = [reply.applied for reply in replies if reply is not None]
        if len(tables) < len(replies):
            return None
        return {name: min(t.get(name, 0) for t in tables) for name in self._shares}

    def _nodes(self) -> dict[str, int]:
        """The nodes for workers that are there now, each with its number of threads."""
        alive = self._client.sync(self._client.scheduler.identity, n_workers=-1)["workers"]
        nodes = [node for node in self._ps.nodes if node.role == "worker"]
        there = [node for node in nodes if node.name not in self._ps.leaving]
        return {node.name: node.threads for node in there if node.address in alive}
