"""Fault plans in YAML: whom, when and how they are written, and what is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from dps.errors import ConfigurationError
from dps.faults import (
    After,
    Among,
    AtSeconds,
    AtUpdates,
    Cut,
    DiskFull,
    During,
    FaultPlan,
    InChain,
    Kill,
    Pause,
    Seat,
)
from dps.virtual.disk import SCHEME
from flows.config.experiment import TrialConfig, load_experiment
from flows.config.faults import fault_of, late, read_trace
from tests.flows.config.test_experiment import SMALL

BASE: dict[str, Any] = {**SMALL, "recovery": "checkpoint"}
NOW = {"at_seconds": 1}
PAUSE = {"kind": "pause", "target": "server-0"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(BASE, sort_keys=False))
    return path


def trial(path: Path, *faults: dict[str, Any], recovery: str = "checkpoint") -> TrialConfig:
    overrides = [f"faults={json.dumps(faults)}", f"recovery={recovery}"]
    ((_, only),) = load_experiment(str(path), overrides).trial_configs()
    written = json.loads(json.dumps(only.model_dump(mode="json")))
    assert TrialConfig.model_validate(written) == only
    copy = pickle.loads(pickle.dumps(only))  # noqa: S301 - as drivers get it
    assert copy.fault_plan == only.fault_plan
    return only


def plan(path: Path, *faults: dict[str, Any], recovery: str = "checkpoint") -> FaultPlan:
    return trial(path, *faults, recovery=recovery).fault_plan


def complaint(path: Path, *faults: dict[str, Any], recovery: str = "checkpoint") -> str:
    with pytest.raises(ConfigurationError) as caught:
        plan(path, *faults, recovery=recovery)
    return str(caught.value)


@pytest.mark.parametrize(
    ("target", "built"),
    [
        (["server-0", "worker-1"], ("server-0", "worker-1")),
        ({"role": "replica", "index": 1}, Seat("replica-1-1")),
        ({"shard": 0, "position": "tail"}, InChain(0, "tail")),
        ({"pick": "random"}, Among("random")),
        ({"pick": "random", "shard": 1}, Among("random", shard=1)),
    ],
)
def test_targets(config: Path, target: object, built: object) -> None:
    (fault,) = plan(config, {**PAUSE, **NOW, "target": target}, recovery="chain")
    assert fault.target == built


def test_moments(config: Path) -> None:
    moments: list[dict[str, Any]] = [
        {"at_updates": 3},
        {"at_seconds": 0.5},
        {"phase": "checkpoint"},
        {"phase": "recovery"},
        {"after": {"fault": 1, "seconds": 0.5}},
    ]
    built = plan(config, *({**PAUSE, **moment} for moment in moments))
    assert [fault.when for fault in built] == [
        AtUpdates(3),
        AtSeconds(0.5),
        During("checkpoint"),
        During("recovery"),
        After(1, 0.5),
    ]


def test_what_recurs_is_expanded_with_the_seed_of_the_trial(config: Path) -> None:
    every = {"mtbf": 2, "shape": 0.7, "until": 30}
    entry = {"kind": "kill", "target": {"pick": "random"}, "every": every}
    text = [f"faults={json.dumps([entry])}", "seeds=[0, 1]"]
    plans = [t.fault_plan for _, t in load_experiment(str(config), text).trial_configs()]
    assert plans[0] != plans[1]
    assert plans[0] == plan(config, entry)


RANGE = {"at_updates": {"between": [20, 60]}}


def test_moments_are_drawn_from_the_seed_the_same_for_all_strategies(config: Path) -> None:
    """Whatever a strategy is, has, or takes: only the seed and the place in the list count."""
    faults = [
        {"kind": "kill", "target": "server-0", **RANGE},
        {"kind": "pause", "target": "server-1", "at_seconds": {"between": [1, 3]}},
        {"kind": "pause", "target": "worker-0", "at_updates": {"between": [10, 20]}},
        {"kind": "kill", "target": {"shard": 0}, "every": {"updates": 9, "until": 90}},
        {"kind": "kill", "target": "server-0", "every": {"mtbf": 4, "until": 50}},
    ]
    strategies = ["none", "checkpoint", "chain", "stateless"]
    text = [
        f"faults={json.dumps(faults)}",
        f"axes={{recovery: {json.dumps(strategies)}, training.workers: [1, 2, 5], "
        "server.spares: [0, 3]}",
        f"seeds={list(range(10))}",
    ]
    plans: dict[int, set[tuple[Any, ...]]] = {}
    for _, each in load_experiment(str(config), text).trial_configs():
        moments = tuple(fault.when for fault in each.fault_plan)
        plans.setdefault(each.seed, set()).add(moments)
    assert all(len(moments) == 1 for moments in plans.values())
    assert len({next(iter(moments)) for moments in plans.values()}) == len(plans)


def test_the_rows_of_a_trace_are_part_of_the_trial(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("seconds,kind,target,duration\n1.5,pause,server-0,2\n")
    entry = {"kind": "trace", "csv": str(path)}
    one = trial(config, entry)
    pause = Pause(Seat("server-0"), AtSeconds(1.5, optional=True), 2.0)
    assert one.fault_plan == (pause,)
    path.write_text("seconds,kind,target,duration\n1.5,pause,server-0,3\n")
    # What was read is kept with the trial; what is read anew is another trial.
    assert TrialConfig.model_validate(one.model_dump(mode="json")).fault_plan == (pause,)
    assert trial(config, entry) != one
    path.write_text("seconds,kind,target,duration\n1.5,pause,server-7,3\n")
    assert "faults.0.csv: row 1: no node 'server-7'" in complaint(config, entry)
    path.unlink()
    assert "faults.0.csv" in complaint(config, entry)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (PAUSE, "expected exactly one moment of at_updates, at_seconds, phase, after, every; got"),
        ({**PAUSE, "phase": "lunch"}, "unknown phase 'lunch'"),
        ({**PAUSE, "after": {"fault": 3}}, "faults.0.after.fault: fault 3 is not earlier"),
        ({**PAUSE, "phase": "recovery"}, "no other fault of the plan takes a shard down"),
        ({**PAUSE, **NOW, "target": "server-9"}, "no node 'server-9' to pause"),
        ({**PAUSE, **NOW, "target": {"shard": 0, "position": 1}}, "a chain of 1 has no position"),
        (
            {**PAUSE, **NOW, "target": {"role": "server", "pick": "each"}},
            "faults.0.target: expected every: as the moment",
        ),
        (
            {**PAUSE, "at_updates": {"between": [60, 20]}},
            "at_updates: between 60 and 20 updates",
        ),
        ({**PAUSE, "every": {"until": 9}}, "expected exactly one of mtbf and updates"),
        ({"kind": "trace", "csv": "nowhere.csv"}, "nowhere.csv: [Errno 2] No such file"),
        (
            {"kind": "corrupt", "shard": 0, "every": {"mtbf": 1e-3, "until": 99}},
            "more than 1000 faults every 0.001 s until 99 s",
        ),
    ],
)
def test_what_cannot_happen_is_refused(config: Path, fault: dict[str, Any], told: str) -> None:
    assert told in complaint(config, fault)


def test_a_strategy_without_the_checkpoints_that_a_fault_needs_is_named(config: Path) -> None:
    corrupt = "axes.faults={broken: [{kind: corrupt, shard: 0, at_updates: 5}]}"
    with pytest.raises(ConfigurationError) as caught:
        load_experiment(str(config), ["axes.recovery=[checkpoint, chain, none]", corrupt])
    assert "axes.faults.broken.0.shard: no checkpoints are written" in str(caught.value)
    assert "(with recovery 'chain')" in str(caught.value)


def test_a_checkpoint_on_virtual_time_cannot_be_hit(config: Path) -> None:
    written = config.read_text()
    config.write_text(f"{written}\ncluster: {{kind: virtual}}\n")
    said = complaint(config, {**PAUSE, "phase": "checkpoint"})
    assert "faults.0.phase: on virtual time a checkpoint takes no time" in said


def test_a_fault_after_the_time_limit_is_late(config: Path) -> None:
    found = trial(config, {**PAUSE, "at_seconds": 60}, {**PAUSE, "at_seconds": 59})
    ((fault, end),) = late(found.fault_plan, found.training.updates, found.time_limit)
    assert (fault.when, end) == (AtSeconds(60.0), "the time limit is 60 s")


def test_a_checkpoint_elsewhere_cannot_be_damaged(config: Path) -> None:
    elsewhere = f"{{durability: {{kind: checkpoint, every: 10, path: '{SCHEME}://far/away'}}}}"
    said = complaint(config, {"kind": "corrupt", "shard": 0, **NOW}, recovery=elsewhere)
    assert "faults.0.shard: needs files on this machine" in said


@pytest.mark.parametrize("way", ["requeue", "host"])
def test_what_no_queueing_system_can_do_is_refused_before_anything_runs(
    config: Path, way: Literal["requeue", "host"]
) -> None:
    kill = {"kind": "kill", "target": "server-0", "at_updates": 5, "by": way}
    with pytest.raises(ConfigurationError, match=r"faults\.0\.by.*killed by signal; .*slurm"):
        plan(config, kill)
    settings = [f"faults={json.dumps([kill])}", "cluster={kind: slurm, memory: 1GB}"]
    ((_, on_slurm),) = load_experiment(str(config), settings).trial_configs()
    assert on_slurm.fault_plan == (Kill("server-0", AtUpdates(5), by=way),)


def test_each_node_of_a_role_fails_by_itself_in_trials_that_have_some(config: Path) -> None:
    """A strategy without such nodes meets no such faults: that is no mistake."""
    every = {"mtbf": 5, "until": 60}
    of_servers = {"kind": "kill", "target": {"role": "server", "pick": "each"}, "every": every}
    of_stores = {"kind": "delay", "target": {"role": "store", "pick": "each"}, "every": every}
    without = trial(config, of_servers, of_stores, recovery="checkpoint").fault_plan
    assert {fault.target for fault in without} == {Seat("server-0"), Seat("server-1")}
    with_store = trial(config, of_servers, of_stores, recovery="stateless").fault_plan
    assert with_store[: len(without)] == without
    assert {fault.target for fault in with_store[len(without) :]} == {Seat("store-0")}


# -- recorded traces -----------------------------------------------------------------------

HEADER = "seconds,kind,target,duration\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


def test_every_row_is_a_fault_that_lapses(trace: Path) -> None:
    rows = "2.5,kill,server-0,1\n3, pause ,worker-1,0.5\n\n4,kill,worker-0,\n5,cut,server-1,2\n"
    trace.write_text("\ufeff" + HEADER + rows + "1,disk_full,server-1,2\n", encoding="utf-8")
    assert tuple(map(fault_of, read_trace(trace))) == (
        Kill("server-0", AtSeconds(2.5, optional=True), 1.0),
        Pause("worker-1", AtSeconds(3.0, optional=True), 0.5),
        Kill("worker-0", AtSeconds(4.0, optional=True), None),
        Cut("server-1", AtSeconds(5.0, optional=True), 2.0),
        DiskFull("server-1", AtSeconds(1.0, optional=True), 2.0),
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seconds,kind,targe,duration\n1,kill,a,1\n", "the columns are seconds, kind, targe,"),
        (HEADER, "it has no rows"),
        (HEADER + "1,kill,server-0,1\n\nsoon,kill,server-0,1\n", "line 4: could not convert"),
        (HEADER + "1,kil,server-0,1\n", "line 2: unknown kind 'kil'; did you mean 'kill'?"),
        (HEADER + "1,pause,server-0,\n", "line 2: Pause: seconds=0"),
    ],
)
def test_a_broken_trace_is_told_with_its_line(trace: Path, text: str, told: str) -> None:
    trace.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_trace(trace)
    assert str(trace) in str(caught.value)
    assert told in str(caught.value)
