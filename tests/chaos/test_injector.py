"""The injector on a real cluster: faults happen in time and with proof, or count as missed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from dps import Chain, ParameterServer, Recovery
from dps.chaos.injector import Injector
from dps.cluster.backends.local import LocalCluster
from dps.cluster.backends.processes import is_running, is_stopped
from dps.cluster.names import NodeSpec
from dps.cluster.platform import SystemClock
from dps.core.faults.plan import AtUpdates, FaultPlan, Kill, Pause
from dps.events import CapacityRestored, Event, FaultMissed, Killed, Paused, Resumed
from tests.support.training import (
    COUNTING,
    PRELOAD,
    SECONDS,
    Events,
    count_until,
    counts,
    nodes,
    params,
    results,
    versions,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster


EVALUATOR = NodeSpec("evaluator-0", "evaluator")


class Broken:
    """A training under a fault plan, on a cluster of its own."""

    def __init__(self, cluster: LocalCluster, ps: ParameterServer, events: Events) -> None:
        self.cluster = cluster
        self.ps = ps
        self.events = events

    def resources(self) -> dict[str, list[str]]:
        """For each node, the Dask resources that it offers."""
        client = self.cluster.client
        workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
        return {str(info["name"]): list(info["resources"]) for info in workers.values()}


@contextmanager
def training(
    folder: Path,
    plan: FaultPlan,
    recovery: Recovery | None = None,
    cluster_of: Sequence[NodeSpec] = (),
    seed: int = 0,
) -> Iterator[Broken]:
    """Train under a plan; after the block, the workers and then the plan come to an end."""
    events, injectors, flag = Events(), list[Injector](), folder / "stop"

    def on_event(event: Event) -> None:
        events(event)
        for injector in injectors:
            injector.note(event)

    members = cluster_of or [*nodes(1, replicas=1, workers=1), EVALUATOR]
    with (
        LocalCluster(members, PRELOAD) as cluster,
        ParameterServer(
            cluster.client,
            params(),
            optimizer=COUNTING,
            recovery=recovery or Recovery(Chain()),
            on_event=on_event,
        ) as ps,
    ):
        with Injector(plan, cluster, ps, SystemClock(), events, seed) as injector:
            injectors.append(injector)
            futures = ps.run(partial(count_until, str(flag)))
            yield Broken(cluster, ps, events)
            flag.touch()
            pushed = sum(results(futures))
        if recovery is None:
            assert counts(ps) == [pushed]


def test_a_node_is_killed_when_enough_updates_are_applied(tmp_path: Path) -> None:
    with training(tmp_path, (Kill("server-0", AtUpdates(50), back_after=None),)) as broken:
        pid = broken.cluster.pids["server-0"]
        (killed,) = eventually(lambda: broken.events.of(Killed), SECONDS)
        assert (killed.fault, killed.node, killed.pid, killed.gone) == (0, "server-0", pid, True)
        assert killed.updates >= 50
    assert not broken.events.of(FaultMissed)
    assert not broken.events.of(CapacityRestored)


def test_capacity_comes_back_after_the_given_time(tmp_path: Path) -> None:
    with training(tmp_path, (Kill("replica-0-1", AtUpdates(20), back_after=0.5),)) as broken:
        (restored,) = eventually(lambda: broken.events.of(CapacityRestored), SECONDS)
        (killed,) = broken.events.of(Killed)
        assert (restored.fault, restored.node) == (0, "replica-0-1-b")
        assert restored.t - killed.t >= 0.5
        eventually(lambda: broken.ps.table().complete, SECONDS)


def test_faults_happen_in_the_order_of_their_updates(tmp_path: Path) -> None:
    plan = (
        Kill("replica-0-1-b", AtUpdates(200), back_after=None),
        Kill("replica-0-1", AtUpdates(20), 0.0),
    )
    with training(tmp_path, plan) as broken:
        eventually(lambda: len(broken.events.of(Killed)) == 2, SECONDS)
    assert [killed.fault for killed in broken.events.of(Killed)] == [1, 0]


def test_a_node_comes_back_in_its_own_role(tmp_path: Path) -> None:
    with training(tmp_path, (Kill("evaluator-0", AtUpdates(20), back_after=0.0),)) as broken:
        back = eventually(lambda: broken.resources().get("evaluator-0-b"), SECONDS)
        assert back == ["evaluator"]


def test_a_paused_node_stops_for_so_long_and_goes_on(tmp_path: Path) -> None:
    with training(tmp_path, (Pause("server-0", AtUpdates(20), seconds=0.4),)) as broken:
        (paused,) = eventually(lambda: broken.events.of(Paused), SECONDS)
        assert (paused.fault, paused.node, paused.stopped) == (0, "server-0", True)
        assert paused.pid == broken.cluster.pids["server-0"]
        (resumed,) = eventually(lambda: broken.events.of(Resumed), SECONDS)
        assert (resumed.fault, resumed.node, resumed.running) == (0, "server-0", True)
        assert 0.4 <= resumed.t - paused.t < SECONDS
    assert not broken.events.of(FaultMissed)


def test_a_node_that_is_paused_at_the_end_of_the_plan_goes_on(tmp_path: Path) -> None:
    with training(tmp_path, (Pause("evaluator-0", AtUpdates(20), seconds=1e3),)) as broken:
        (paused,) = eventually(lambda: broken.events.of(Paused), SECONDS)
        assert is_stopped(paused.pid, 0.0)
    (resumed,) = broken.events.of(Resumed)
    assert resumed.running
    assert not broken.events.of(FaultMissed)


def test_a_pause_without_effect_is_missed(tmp_path: Path) -> None:
    plan = (
        Pause("replica-0-1", AtUpdates(20), seconds=0.3),
        Pause("spare-7", AtUpdates(20)),
    )
    with training(tmp_path, plan) as broken:
        (paused,) = eventually(lambda: broken.events.of(Paused), SECONDS)
        broken.cluster.resume("replica-0-1")  # as an outsider might
        assert is_running(paused.pid, SECONDS)
        eventually(lambda: len(broken.events.of(FaultMissed)) == 2, SECONDS)
    assert {m.fault: m.reason for m in broken.events.of(FaultMissed)} == {
        0: f"process {paused.pid} did not stay stopped",
        1: "there is no such process",
    }


def test_a_node_may_be_killed_while_it_is_paused(tmp_path: Path) -> None:
    plan = (
        Pause("evaluator-0", AtUpdates(20), seconds=SECONDS),
        Pause("evaluator-0", AtUpdates(30)),
        Kill("evaluator-0", AtUpdates(40), back_after=None),
    )
    with training(tmp_path, plan) as broken:
        (killed,) = eventually(lambda: broken.events.of(Killed), SECONDS)
        assert killed.gone
    (missed,) = broken.events.of(FaultMissed)
    assert (missed.fault, missed.reason) == (1, "its process was stopped already")
    assert not broken.events.of(Resumed)


def test_a_fault_that_never_comes_is_missed(tmp_path: Path) -> None:
    with training(tmp_path, (Kill("server-0", AtUpdates(10**9)),)) as broken:
        eventually(lambda: versions(broken.ps)[0] > 20, SECONDS)
    (missed,) = broken.events.of(FaultMissed)
    assert (missed.fault, missed.target) == (0, "server-0")
    assert "before the fault at 1000000000" in missed.reason
    assert not broken.events.of(Killed)


def test_a_fault_on_a_node_that_is_not_there_is_missed(tmp_path: Path) -> None:
    plan = (
        Kill("server-0", AtUpdates(20), None),
        Kill("server-0", AtUpdates(40), None),
        Kill("server-9", AtUpdates(60), None),
    )
    with training(tmp_path, plan) as broken:
        eventually(lambda: len(broken.events.of(FaultMissed)) == 2, SECONDS)
    assert {m.fault: m.reason for m in broken.events.of(FaultMissed)} == {
        1: "there is no such process",
        2: "there is no such process",
    }


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_faults_are_missed_when_the_injector_fails() -> None:
    plan = (Kill("evaluator-0", AtUpdates(1)), Kill("evaluator-0-b", AtUpdates(2)))
    events = Events()
    with LocalCluster([*nodes(1, workers=1), EVALUATOR], PRELOAD) as cluster:
        with ParameterServer(cluster.client, params()) as ps:
            pass
        with Injector(plan, cluster, ps, SystemClock(), events):  # a closed one answers nothing
            eventually(lambda: len(events.of(FaultMissed)) == 2, SECONDS)
    assert {missed.reason for missed in events.of(FaultMissed)} == {"the injector failed"}
