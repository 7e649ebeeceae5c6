"""The injector on a real cluster: faults happen in time and with proof, or count as missed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from dps import Chain, ParameterServer, Recovery
from dps.cluster.backends.local import LocalCluster
from dps.cluster.backends.processes import state_of
from dps.cluster.names import NodeSpec
from dps.events import CapacityRestored, Event, FaultMissed, Killed, Paused, Resumed
from dps.faults import After, AtUpdates, During, FaultPlan, Kill, Pause
from dps.faults.injector import Injector
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
        with Injector(plan, cluster, ps, events, seed) as injector:
            injectors.append(injector)
            futures = ps.run(partial(count_until, str(flag)))
            yield Broken(cluster, ps, events)
            flag.touch()
            pushed = sum(results(futures))
        if recovery is None:
            assert counts(ps) == [pushed]


def test_nodes_are_killed_in_the_order_of_the_updates_and_capacity_comes_back(
    tmp_path: Path,
) -> None:
    plan = (
        Kill("evaluator-0", AtUpdates(200), back_after=None),
        Kill("replica-0-1", AtUpdates(20), back_after=0.5),
        Kill("server-9", AtUpdates(30), None),
        Kill("server-0", AtUpdates(10**9)),
    )
    with training(tmp_path, plan) as broken:
        pid = broken.cluster.pids["replica-0-1"]
        eventually(lambda: len(broken.events.of(Killed)) == 2, SECONDS)
        eventually(lambda: broken.events.of(CapacityRestored), SECONDS)
        eventually(lambda: broken.ps.table().complete, SECONDS)
    first, second = broken.events.of(Killed)
    assert (first.fault, first.node, first.pid, first.gone) == (1, "replica-0-1", pid, True)
    assert (second.fault, second.node, second.gone) == (0, "evaluator-0", True)
    assert first.updates >= 20
    (restored,) = broken.events.of(CapacityRestored)
    assert (restored.fault, restored.node) == (1, "replica-0-1-b")
    assert restored.t - first.t >= 0.5
    missed = {m.fault: m.reason for m in broken.events.of(FaultMissed)}
    assert missed.keys() == {2, 3}
    assert missed[2] == "no such process"
    assert "before the fault at 1000000000 updates" in missed[3]


def test_a_paused_node_stops_for_so_long_and_goes_on_at_the_end_at_the_latest(
    tmp_path: Path,
) -> None:
    plan = (
        Pause("server-0", AtUpdates(20), seconds=0.4),
        Pause("evaluator-0", AtUpdates(20), seconds=1e3),
        Kill("server-0", During("recovery")),
    )
    with training(tmp_path, plan) as broken:
        eventually(lambda: len(broken.events.of(Paused)) == 2, SECONDS)
        of = {paused.fault: paused for paused in broken.events.of(Paused)}
        assert (of[0].node, of[0].stopped) == ("server-0", True)
        assert of[0].pid == broken.cluster.pids["server-0"]
        (resumed,) = eventually(lambda: broken.events.of(Resumed), SECONDS)
        assert (resumed.fault, resumed.node, resumed.running) == (0, "server-0", True)
        assert 0.4 <= resumed.t - of[0].t < SECONDS
        assert state_of(of[1].pid) == "stopped"
    assert broken.events.of(Resumed)[-1].fault == 1
    assert broken.events.of(Resumed)[-1].running
    (missed,) = broken.events.of(FaultMissed)
    assert missed.reason.endswith("before the fault while a shard is restored")


def test_a_pause_without_effect_is_missed_and_so_is_what_was_to_follow_it(tmp_path: Path) -> None:
    plan = (
        Pause("replica-0-1", AtUpdates(20), seconds=0.3),
        Pause("spare-7", AtUpdates(20)),
        Kill("server-0", After(1)),
    )
    with training(tmp_path, plan) as broken:
        (paused,) = eventually(lambda: broken.events.of(Paused), SECONDS)
        broken.cluster.resume("replica-0-1")  # as an outsider might
        eventually(lambda: state_of(paused.pid) == "running", SECONDS)
        eventually(lambda: len(broken.events.of(FaultMissed)) == 3, SECONDS)
    assert {m.fault: m.reason for m in broken.events.of(FaultMissed)} == {
        0: f"process {paused.pid} did not stay stopped",
        1: "no such process",
        2: "fault 1, which it follows, had no effect",
    }


def test_a_node_may_be_killed_while_it_is_paused(tmp_path: Path) -> None:
    plan = (
        Pause("evaluator-0", AtUpdates(20), seconds=SECONDS),
        Pause("evaluator-0", AtUpdates(30)),
        Kill("evaluator-0", AtUpdates(40), back_after=None),
        Kill("evaluator-0", AtUpdates(50), back_after=None),
    )
    with training(tmp_path, plan) as broken:
        (killed,) = eventually(lambda: broken.events.of(Killed), SECONDS)
        assert killed.gone
        eventually(lambda: len(broken.events.of(FaultMissed)) == 2, SECONDS)
    assert {m.fault: m.reason for m in broken.events.of(FaultMissed)} == {
        1: "its process was already stopped",
        3: "no such process",
    }
    assert not broken.events.of(Resumed)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_faults_are_missed_when_the_injector_fails() -> None:
    plan = (Kill("evaluator-0", AtUpdates(1)), Kill("evaluator-0-b", AtUpdates(2)))
    events = Events()
    with LocalCluster([*nodes(1, workers=1), EVALUATOR], PRELOAD) as cluster:
        with ParameterServer(cluster.client, params()) as ps:
            pass
        with Injector(plan, cluster, ps, events):  # a closed one answers nothing
            eventually(lambda: len(events.of(FaultMissed)) == 2, SECONDS)
    assert {missed.reason for missed in events.of(FaultMissed)} == {"the injector failed"}
