"""Moments and targets on a real cluster: when faults come, and whom they hit then."""

from __future__ import annotations

from pathlib import Path

import pytest

from dps import Checkpoint, Recovery
from dps.cluster.backends.processes import is_gone
from dps.events import (
    CapacityRestored,
    CheckpointWritten,
    FaultMissed,
    Killed,
    Paused,
    PhaseMet,
    Restored,
    Resumed,
)
from dps.faults import (
    After,
    Among,
    AtSeconds,
    AtUpdates,
    During,
    InChain,
    Kill,
    Pause,
    Seat,
)
from dps.faults.targets import Targets
from tests.faults.test_injector import EVALUATOR, Broken, training
from tests.support.training import SECONDS, nodes
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster


def killed(broken: Broken, count: int) -> list[Killed]:
    eventually(lambda: len(broken.events.of(Killed)) >= count, SECONDS)
    return broken.events.of(Killed)


def test_moments_in_seconds_after_each_other_and_at_once(tmp_path: Path) -> None:
    plan = (
        Pause("evaluator-0", AtSeconds(0.3), seconds=0.2),
        Kill("replica-0-1", After(3, 0.25), back_after=None),
        Pause("server-0", AtSeconds(1e4)),
        Pause(("worker-0", "replica-0-1"), After(0, 0.3), seconds=0.1),
        Kill("evaluator-0", AtSeconds(1e4, optional=True)),
    )
    with training(tmp_path, plan) as broken:
        (gone,) = killed(broken, 1)
    first, *both = broken.events.of(Paused)
    assert (first.fault, first.node) == (0, "evaluator-0")
    assert {(p.fault, p.node) for p in both} == {(3, "worker-0"), (3, "replica-0-1")}
    assert all(pause.t - first.t >= 0.3 for pause in both)
    assert abs(both[0].t - both[1].t) < 0.1
    assert len(broken.events.of(Resumed)) == 3
    assert gone.fault == 1
    assert gone.t - max(pause.t for pause in both) >= 0.25
    (missed,) = broken.events.of(FaultMissed)  # the other that never came may lapse
    assert missed.fault == 2
    assert "s, before the fault at 1e+04 s" in missed.reason


@pytest.mark.slow
def test_a_place_in_a_chain_is_looked_up_when_the_fault_is_due(tmp_path: Path) -> None:
    head = InChain(0, "head")
    plan = (
        Kill(head, AtUpdates(20), back_after=0.0),
        Kill(head, After(0, 1.5), back_after=None),
        Pause(Seat("server-0"), After(1, 0.1), seconds=0.1),
    )
    with training(tmp_path, plan) as broken:
        first, second = killed(broken, 2)
        eventually(lambda: broken.events.of(Resumed), SECONDS)
    assert (first.node, second.node) == ("server-0", "replica-0-1")
    (restored,) = broken.events.of(CapacityRestored)
    assert restored.node == broken.events.of(Paused)[0].node == "server-0-b"
    assert not broken.events.of(FaultMissed)


def test_targets_that_are_drawn_follow_from_the_seed(tmp_path: Path) -> None:
    with training(tmp_path, ()) as broken:
        targets = [Targets(broken.cluster, broken.ps, seed) for seed in (0, 0, *range(1, 20))]

        def found(target: Among | InChain | Seat, number: int = 0) -> list[tuple[str, ...]]:
            return [t.of(number, Pause(target, AtUpdates(1))) for t in targets]

        first, again, *others = found(Among("random"))
        assert first == again
        assert set(others) > {first}
        assert set(found(Among("random"), 1)) != {first}
        everyone = ("evaluator-0", "replica-0-1", "server-0", "worker-0")
        assert found(Among("all"))[0] == everyone
        assert found(Among("all", role="worker"))[0] == ("worker-0",)
        assert found(Among("all", shard=0))[0] == ("server-0", "replica-0-1")
        assert found(Among("random", role="spare"))[0] == ()
        assert found(InChain(0, "tail"))[0] == found(InChain(0, 1))[0] == ("replica-0-1",)
        assert found(InChain(0, "middle"))[0] == found(InChain(0, 2))[0] == ()
        pid = broken.cluster.kill("evaluator-0")
        assert is_gone(pid, SECONDS)
        assert found(Among("all"))[0] == everyone[1:]


def test_a_server_is_killed_while_it_writes_a_checkpoint(tmp_path: Path) -> None:
    kept = Recovery(Checkpoint(every=10, path=str(tmp_path / "checkpoints")))
    plan = (Kill(InChain(0), During("checkpoint"), back_after=0.0),)
    members = [*nodes(1, workers=1), EVALUATOR]
    with training(tmp_path, plan, kept, members) as broken:
        (gone,) = killed(broken, 1)
        eventually(lambda: broken.events.of(PhaseMet), SECONDS)
        eventually(lambda: [r for r in broken.events.of(Restored) if r.epoch > 1], SECONDS)
    (met,) = broken.events.of(PhaseMet)
    assert (met.fault, met.phase, gone.node) == (0, "checkpoint", "server-0")
    # What was being written never became whole, and is not what the shard went on from.
    index = int(met.evidence.split("-i")[1].split()[0])
    whole = [w.version for w in broken.events.of(CheckpointWritten) if w.epoch == 1]
    assert index not in whole
    assert not broken.events.of(FaultMissed)


def test_a_node_is_killed_while_its_shard_is_restored(tmp_path: Path) -> None:
    kept = Recovery(Checkpoint(every=10, path=str(tmp_path / "checkpoints")))
    plan = (
        Kill("server-0", AtUpdates(20), back_after=0.4),
        Kill("evaluator-0", During("recovery"), back_after=None),
        Kill(Seat("server-0"), During("recovery"), back_after=0.0),
    )
    members = [*nodes(1, workers=1), EVALUATOR]
    with training(tmp_path, plan, kept, members) as broken:
        first, second, third = killed(broken, 3)
        (restored,) = eventually(
            lambda: [r for r in broken.events.of(Restored) if r.epoch > 1], SECONDS
        )
    assert [kill.node for kill in (first, second, third)] == [
        "server-0",
        "evaluator-0",
        "server-0-b",  # that it is about to be restored on
    ]
    assert first.t < second.t < third.t < restored.t
    assert restored.node == "server-0-b-b"
    met = broken.events.of(PhaseMet)
    assert [(each.fault, each.phase) for each in met] == [(1, "recovery"), (2, "recovery")]
    assert all(each.evidence.startswith("shard 0: no node served it in epoch") for each in met)
    assert not broken.events.of(FaultMissed)
