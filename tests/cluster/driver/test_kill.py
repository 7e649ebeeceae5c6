"""Real SIGKILL of servers, replicas and workers in the middle of training, strategy by strategy."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Future, KilledWorker

from dps import (
    ASP,
    BSP,
    SSP,
    Chain,
    Checkpoint,
    Consistency,
    Continue,
    ParameterServer,
    Recovery,
    SharedStore,
    SignificantlyModified,
    Worker,
)
from dps.cluster.backends.local import LocalCluster
from dps.cluster.backends.processes import is_gone
from dps.cluster.names import NodeSpec
from dps.errors import ConfigurationError
from dps.events import (
    Detected,
    Promoted,
    Replayed,
    ReplicaAdded,
    Restored,
    WorkerJoined,
    WorkerLeft,
)
from dps.protocol.timings import Timings
from tests.support.training import (
    COUNTING,
    PATIENT,
    PRELOAD,
    SECONDS,
    Events,
    audited,
    count_until,
    counts,
    hide,
    nodes,
    ones,
    params,
    results,
    versions,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

STATELESS = Recovery(SharedStore(), Continue())


@dataclass
class Run:
    """A group whose two workers push until they are told to stop."""

    cluster: LocalCluster
    ps: ParameterServer
    events: Events
    futures: list[Future]
    flag: Path

    def lose(self, name: str, after: int = 20) -> None:
        """SIGKILL a node after so many more updates; return when the others know it."""
        self.advance(after)
        address = next(node.address for node in self.ps.nodes if node.name == name)
        assert is_gone(self.cluster.kill(name), SECONDS)
        eventually(lambda: address not in self.serving(), SECONDS)

    def both_push(self) -> bool:
        """Whether every shard has updates of both workers."""
        return all(
            len(reply.applied) == 2 and min(reply.applied.values()) > 0
            for reply in audited(self.ps)
        )

    def serving(self) -> set[str]:
        """The addresses of the nodes that hold a replica."""
        return {host.address for view in self.ps.table().views for host in view.chain}

    def advance(self, updates: int = 20) -> None:
        """Wait until every shard is served in full and has applied so many more updates."""
        eventually(lambda: self.ps.table().complete, SECONDS)
        before = [reply.version for reply in audited(self.ps)]

        def advanced() -> bool:
            now = versions(self.ps)
            return all(n >= b + updates for n, b in zip(now, before, strict=True))

        eventually(advanced, SECONDS)

    def finish(self) -> int:
        """Let the workers come to an end; return how many updates they pushed."""
        self.flag.touch()
        return sum(results(self.futures))


@contextmanager
def training(
    folder: Path,
    recovery: Recovery,
    specs: list[NodeSpec],
    consistency: Consistency = ASP(),  # noqa: B008 - a frozen value
    shards: int = 2,
    timings: Timings = Timings(),
    train: Callable[..., int] = count_until,
    **more: Any,
) -> Iterator[Run]:
    """Start a group and its two workers on a fresh cluster."""
    events, flag = Events(), folder / "stop"
    choices: dict[str, Any] = {
        "optimizer": COUNTING,
        "consistency": consistency,
        "timings": timings,
        **more,
    }
    with (
        LocalCluster(specs, PRELOAD) as cluster,
        ParameterServer(
            cluster.client, params(), shards=shards, recovery=recovery, on_event=events, **choices
        ) as ps,
    ):
        futures = ps.run(partial(train, str(flag)), workers=2)
        run = Run(cluster, ps, events, futures, flag)
        eventually(run.both_push, SECONDS)
        yield run


def assert_nothing_lost_and_nothing_twice(run: Run, pushed: int) -> None:
    """Every update that was pushed, acked or buffered is in the final weights exactly once."""
    assert counts(run.ps) == [pushed] * len(run.ps.group.layout.shards)
    for reply in audited(run.ps):
        assert reply.version == pushed == sum(reply.applied.values())
    run.ps.close()  # the last events arrive
    for updates in run.events.acked("applied", "duplicate", "buffered").values():
        assert len(updates) == pushed
        for name in {worker for worker, _, _ in updates}:
            numbers = sorted(seq for worker, _, seq in updates if worker == name)
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def restoration(run: Run) -> Restored:
    """How shard 0 came back last."""
    return max((r for r in run.events.of(Restored) if r.shard == 0), key=lambda r: r.epoch)


def test_a_checkpoint_loses_no_more_than_its_interval(tmp_path: Path) -> None:
    recovery = Recovery(Checkpoint(every=10, path=str(tmp_path / "checkpoints")))
    with training(tmp_path, recovery, nodes(spares=2)) as run:
        run.lose("server-0", after=35)
        run.lose("server-1", after=0)
        run.advance()
        pushed = run.finish()
        assert counts(run.ps) == [reply.version for reply in audited(run.ps)]
        assert all(0 <= pushed - reply.version <= 10 for reply in audited(run.ps))
    restored = restoration(run)
    assert restored.source == "checkpoint"
    assert restored.version >= 25


def count_and_check(flag: str, worker: Worker) -> int:
    """Push until there is a file `flag`; whatever is read must be one count, and no less."""
    gradients = ones(worker.pull())
    for step in itertools.count(1):
        for name, found in worker.push_pull(gradients).items():
            of_shards = set(found.reshape(-1).tolist())
            if len(of_shards) > 2 or min(of_shards) < step:  # each array is on two shards at most
                raise AssertionError(f"update {step}: {name!r} was read as {sorted(of_shards)}")
        if os.path.exists(flag):
            return step
    raise AssertionError


def test_a_chain_survives_one_loss_after_the_other(tmp_path: Path) -> None:
    """Nor do filtered pulls show less; and nobody waits for a lease or the end of a call."""
    more: dict[str, Any] = {"train": count_and_check, "timings": PATIENT}
    more["pull_filters"] = {"*": [SignificantlyModified(0.0)]}
    with training(tmp_path, Recovery(Chain()), nodes(replicas=1, spares=2), **more) as run:
        assert all(address.startswith("tls://") for address in run.serving())
        run.lose("server-0")
        eventually(lambda: [e.node for e in run.events.of(Detected)] == ["server-0"], SECONDS)
        run.advance()
        run.lose("replica-0-1")  # the head by now
        run.advance()
        pushed = run.finish()
        assert [len(view.chain) for view in run.ps.table().views] == [2, 2]
        assert_nothing_lost_and_nothing_twice(run, pushed)
        assert run.ps.losses == []
    for shard, updates in run.events.acked("applied", "duplicate").items():
        assert set(updates) <= run.events.applied()[shard]
    promoted = [event.node for event in run.events.of(Promoted) if event.epoch > 1]
    assert promoted == ["replica-0-1", "spare-0"]
    added = [event.node for event in run.events.of(ReplicaAdded)]
    assert {"spare-0", "spare-1"} <= set(added)


def test_a_chain_of_three_survives_two_losses_at_once(tmp_path: Path) -> None:
    with training(tmp_path, Recovery(Chain(3)), nodes(1, replicas=2), shards=1) as run:
        run.advance()
        lost = [run.cluster.kill(name) for name in ("server-0", "replica-0-1")]
        assert all(is_gone(pid, SECONDS) for pid in lost)
        # Sooner than an attempt to connect to a node that is gone would take.
        eventually(lambda: len(run.serving()) == 1 and versions(run.ps)[0] >= 0, 3.0)
        pushed = run.finish()
        assert_nothing_lost_and_nothing_twice(run, pushed)


def buffered(run: Run) -> bool:
    """Whether each worker has buffered a gradient since its shard was lost."""
    return len({worker for worker, _, _ in run.events.acked("buffered").get(0, [])}) == 2


def assert_buffered_gradients_were_replayed(run: Run) -> None:
    replayed = [event for event in run.events.of(Replayed) if event.shard == 0]
    assert sum(event.count for event in replayed) > 0
    entered = sum(event.count + event.duplicates for event in replayed)
    assert entered == len(run.events.acked("buffered")[0])


def test_stateless_applies_what_was_computed_during_the_outage(tmp_path: Path) -> None:
    with training(tmp_path, STATELESS, nodes(store=True)) as run:
        run.lose("server-0")
        eventually(lambda: buffered(run), SECONDS)
        run.cluster.start(NodeSpec("server-0-b", "server"))
        run.advance()
        pushed = run.finish()
        assert_nothing_lost_and_nothing_twice(run, pushed)
    assert_buffered_gradients_were_replayed(run)
    assert restoration(run).source == "store"


@pytest.mark.slow
def test_a_lost_worker_does_not_hold_up_the_others(tmp_path: Path) -> None:
    with training(tmp_path, Recovery(Chain()), nodes(replicas=1), BSP()) as run:
        run.lose("worker-0")
        run.advance()
        run.flag.touch()
        ended = {True: [], False: []}
        for future in run.futures:
            eventually(future.done, SECONDS)
            ended[future.status == "finished"].append(future)
        (survivor,), (lost,) = ended[True], ended[False]
        with pytest.raises(KilledWorker):
            lost.result()
        for reply in audited(run.ps):
            assert survivor.result() in reply.applied.values()
            assert reply.version == sum(reply.applied.values())
        assert len({reply.version for reply in audited(run.ps)}) <= 2
    assert sorted(left.reason for left in run.events.of(WorkerLeft)) == ["finished", "lost"]


@pytest.mark.slow
def test_a_lost_worker_starts_again_as_another_incarnation(tmp_path: Path) -> None:
    with training(tmp_path, Recovery(Chain()), nodes(replicas=1)) as run:
        run.lose("worker-0")
        lost = eventually(lambda: [f for f in run.futures if f.status == "error"], SECONDS)
        (survivor,) = (future for future in run.futures if future not in lost)
        (left,) = eventually(lambda: run.events.of(WorkerLeft), SECONDS)
        with pytest.raises(ConfigurationError, match="no node for workers is named 'worker-9'"):
            run.ps.run_again(partial(count_until, str(run.flag)), left.worker, "worker-9")
        run.cluster.start(NodeSpec("worker-9", "worker"))
        eventually(lambda: "worker-9" in {node.name for node in run.ps.nodes}, SECONDS)
        again = run.ps.run_again(partial(count_until, str(run.flag)), left.worker, "worker-9")
        joined = eventually(lambda: run.events.of(WorkerJoined)[2:], SECONDS)
        assert [(e.worker, e.incarnation, e.node) for e in joined] == [(left.worker, 2, "worker-9")]
        run.advance()
        run.flag.touch()
        pushed = sum(results([survivor, again]))
        for reply in audited(run.ps):
            assert reply.version == sum(reply.applied.values()) >= pushed


def pause(run: Run, name: str) -> None:
    """SIGSTOP a node whose monitor is silent; return when it is given up."""
    address = next(node.address for node in run.ps.nodes if node.name == name)
    run.cluster.client.run(partial(hide, 2 * SECONDS), workers=[address])
    run.cluster.pause(name)
    eventually(lambda: address not in run.serving(), SECONDS)


@pytest.mark.slow
def test_a_paused_server_is_replaced_and_comes_back_with_nothing(tmp_path: Path) -> None:
    paused = "server-0"
    with training(tmp_path, Recovery(Chain()), nodes(replicas=1, spares=1)) as run:
        run.advance()
        pause(run, paused)
        run.advance()
        run.cluster.resume(paused)
        run.lose("spare-0")  # now the one that was paused is the only one left to take its place
        run.advance()
        pushed = run.finish()
        assert_nothing_lost_and_nothing_twice(run, pushed)
    first = run.events.of(Detected)[0]
    assert (first.node, first.by) == (paused, "lease")


@pytest.mark.slow
def test_a_paused_worker_holds_the_others_up_for_a_lease_and_takes_part_again(
    tmp_path: Path,
) -> None:
    with training(tmp_path, Recovery(Chain()), nodes(replicas=1), SSP(1)) as run:
        run.advance()
        run.cluster.pause("worker-0")
        began = time.time()
        eventually(lambda: run.events.of(WorkerLeft), SECONDS)
        assert time.time() - began < run.ps.group.timings.lease + run.ps.group.timings.call
        run.advance()
        run.cluster.resume("worker-0")
        eventually(lambda: len(run.events.of(WorkerJoined)) == 3, SECONDS)
        run.advance()
        run.finish()
        for reply in audited(run.ps):
            assert reply.version == sum(reply.applied.values())
        assert counts(run.ps) == [reply.version for reply in audited(run.ps)]
    joined = [(event.worker, event.incarnation) for event in run.events.of(WorkerJoined)]
    assert joined[-1][1] == 2


def kill_process(client: Client, address: str) -> None:
    os.kill(client.run(os.getpid, workers=[address])[address], signal.SIGKILL)


@pytest.mark.slow
def test_a_node_that_dask_restarts_takes_the_place_of_a_lost_server(
    plain: Client, tmp_path: Path
) -> None:
    flag = tmp_path / "stop"
    with ParameterServer(plain, params(), optimizer=COUNTING, recovery="chain") as ps:
        futures = ps.run(partial(count_until, str(flag)), workers=2)
        eventually(lambda: versions(ps)[0] > 20, SECONDS)
        head, tail = ps.table().views[0].chain
        kill_process(plain, head.address)
        eventually(lambda: ps.table().views[0].chain[0] == tail, SECONDS)
        eventually(lambda: ps.table().complete, SECONDS)
        flag.touch()
        pushed = sum(results(futures))
        assert counts(ps) == [pushed]


def test_a_worker_that_dask_runs_again_is_another_incarnation(
    plain: Client, tmp_path: Path
) -> None:
    events, flag = Events(), tmp_path / "stop"
    with ParameterServer(plain, params(), optimizer=COUNTING, on_event=events) as ps:
        (future,) = ps.run(partial(count_until, str(flag)))
        eventually(lambda: versions(ps)[0] > 20, SECONDS)
        kill_process(plain, next(a for a, keys in plain.processing().items() if keys))
        eventually(lambda: len(events.of(WorkerJoined)) == 2, SECONDS)
        flag.touch()
        again = future.result(timeout=SECONDS)
        (reply,) = audited(ps)
        assert counts(ps) == [reply.version]
        assert reply.version > again
    assert [joined.incarnation for joined in events.of(WorkerJoined)] == [1, 2]
