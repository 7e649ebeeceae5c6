"""Real SIGKILL of every copy above a layer of checkpoints: the shard goes on from the newest."""

from __future__ import annotations

import os
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dps import Chain, Checkpoint, Layered, ParameterServer, Recovery, SharedStore
from dps.cluster.backends.local import LocalCluster
from dps.events import CheckpointWritten, LossReported
from dps.protocol.timings import Timings
from dps.recovery.manifest import find_saved
from tests.cluster.driver.test_kill import Run, restoration, training
from tests.support.training import (
    COUNTING,
    PRELOAD,
    SECONDS,
    audited,
    count,
    counts,
    nodes,
    params,
    results,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

# So that on a busy machine nobody else is given up: that a process was killed shows at once.
PATIENT = Timings(lease=10.0)


def over(above: Chain | SharedStore, path: Path, **choices: Any) -> Recovery:
    return Recovery(Layered(above, Checkpoint(path=str(path), **choices)))


def saved_versions(path: Path) -> list[int]:
    return [state.version for state in find_saved(str(path)).states]


def written(run: Run) -> int:
    """The version of the newest checkpoint of shard 0 of which an event has come by now."""
    of_shard = [e.version for e in run.events.of(CheckpointWritten) if e.shard == 0]
    return max(of_shard, default=0)


def kill_together(run: Run, *names: str) -> None:
    """SIGKILL nodes at once, as a rack that loses its power does; return when others know it."""
    lost = {node.address for node in run.ps.nodes if node.name in names}
    pids = [run.cluster.pids[name] for name in names]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not run.serving() & lost, SECONDS)


def assert_only_what_is_told_of_is_lost(run: Run, pushed: int, saved: int) -> None:
    """Shard 0 went back to a checkpoint no older than `saved`; every other update is there once."""
    eventually(lambda: restoration(run).source == "checkpoint", SECONDS)  # the event may be late
    assert restoration(run).version >= saved >= 20
    lost = run.ps.updates_lost
    assert {loss.shard for loss in run.ps.losses} <= {0}
    assert {loss.source for loss in run.ps.losses} <= {"checkpoint"}
    assert counts(run.ps) == [pushed - lost, pushed]
    for reply in audited(run.ps):
        assert reply.version == sum(reply.applied.values())
    eventually(lambda: sum(e.updates for e in run.events.of(LossReported)) == lost, SECONDS)


def test_all_replicas_of_a_chain_are_lost_together(tmp_path: Path) -> None:
    recovery = over(Chain(2), tmp_path / "checkpoints", every=20)
    with (
        warnings.catch_warnings(),
        training(tmp_path, recovery, nodes(replicas=1, spares=2), timings=PATIENT) as run,
    ):
        warnings.simplefilter("ignore")
        eventually(lambda: written(run) >= 20, SECONDS)
        saved = written(run)
        view = run.ps.table().views[0]
        of = {node.address: node.name for node in run.ps.nodes}
        kill_together(run, *(of[host.address] for host in view.chain))
        run.advance()
        assert_only_what_is_told_of_is_lost(run, run.finish(), saved)


def test_a_layered_group_is_saved_when_asked_and_goes_on_from_its_path(tmp_path: Path) -> None:
    recovery = over(SharedStore(), tmp_path, every=1000)
    with LocalCluster(nodes(store=True), PRELOAD) as cluster:
        with ParameterServer(
            cluster.client, params(), shards=2, optimizer=COUNTING, recovery=recovery
        ) as ps:
            results(ps.run(partial(count, 20)))
            ps.checkpoint()
            assert saved_versions(tmp_path) == [20, 20]
            results(ps.run(partial(count, 7)))
        assert saved_versions(tmp_path) == [27, 27]
        with ParameterServer.resume(cluster.client, str(tmp_path)) as ps:
            assert ps.group.recovery.durability == recovery.durability
            assert counts(ps) == [27, 27]
