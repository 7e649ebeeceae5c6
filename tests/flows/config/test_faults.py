"""Fault plans in YAML: whom, when and how they are written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.core.faults.expansion import Process
from dps.core.faults.plan import (
    After,
    Among,
    AtSeconds,
    AtUpdates,
    Corrupt,
    Cut,
    Delay,
    DiskFull,
    During,
    FaultPlan,
    InChain,
    Kill,
    Pause,
    Seat,
    Slow,
)
from dps.errors import ConfigurationError
from dps.sim.disk import SCHEME
from flows.config.experiment import TrialConfig, load_experiment
from flows.config.faults import EverySection

BASE: dict[str, Any] = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"updates": 100},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "recovery": "checkpoint",
}
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
    return only


def plan(path: Path, *faults: dict[str, Any], recovery: str = "checkpoint") -> FaultPlan:
    return trial(path, *faults, recovery=recovery).build_faults()


def complaint(path: Path, *faults: dict[str, Any], recovery: str = "checkpoint") -> str:
    with pytest.raises(ConfigurationError) as caught:
        plan(path, *faults, recovery=recovery)
    return str(caught.value)


def test_kinds(config: Path) -> None:
    at = {"target": "server-0", "at_updates": 5, "seconds": 3}
    built = plan(
        config,
        {"kind": "slow", "factor": 2, **at},
        {"kind": "cut", "direction": "in", **at},
        {"kind": "delay", "delay_seconds": 0.1, **at},
        {"kind": "disk_full", **at},
        {"kind": "corrupt", "shard": 1, "at_updates": 5},
    )
    five = AtUpdates(5)
    assert built == (
        Slow("server-0", five, 2.0, 3.0),
        Cut("server-0", five, 3.0, "in"),
        Delay("server-0", five, 0.1, 3.0),
        DiskFull("server-0", five, 3.0),
        Corrupt(1, five),
    )


@pytest.mark.parametrize(
    ("target", "built"),
    [
        (["server-0", "worker-1"], ("server-0", "worker-1")),
        ({"role": "worker"}, Seat("worker-0")),
        ({"role": "replica", "index": 1}, Seat("replica-1-1")),
        ({"shard": 1}, InChain(1, "head")),
        ({"shard": 0, "position": "tail"}, InChain(0, "tail")),
        ({"shard": 0, "position": 1}, InChain(0, 1)),
        ({"pick": "random"}, Among("random")),
        ({"pick": "all", "role": "worker"}, Among("all", "worker")),
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
    every = {"mtbf": 2, "distribution": "weibull", "shape": 0.7, "until": 30}
    entry = {"kind": "kill", "target": {"pick": "random"}, "every": every}
    text = [f"faults={json.dumps([entry])}", "seeds=[0, 1]"]
    plans = [t.build_faults() for _, t in load_experiment(str(config), text).trial_configs()]
    assert plans[0] != plans[1]
    assert plans[0] == plan(config, entry)
    flap = {"kind": "flap", "by": "kill", "target": "server-0", "at_updates": 5, "times": 2}
    assert plan(config, flap) == (
        Kill(Seat("server-0"), AtUpdates(5), 1.0),
        Kill(Seat("server-0"), After(0, 2.0), 1.0),
    )


RANGE = {"at_updates": {"between": [20, 60]}}


def test_moments_are_drawn_from_the_seed_the_same_for_all_strategies(config: Path) -> None:
    """Whatever a strategy is, has, or takes: only the seed and the place in the list count."""
    faults = [
        {"kind": "kill", "target": "server-0", **RANGE},
        {"kind": "pause", "target": "server-1", "at_seconds": {"between": [1, 3]}},
        {"kind": "flap", "target": "worker-0", "at_updates": {"between": [10, 20]}, "times": 2},
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
        moments = tuple(fault.when for fault in each.build_faults())
        plans.setdefault(each.seed, set()).add(moments)
    assert all(len(moments) == 1 for moments in plans.values())
    assert len({next(iter(moments)) for moments in plans.values()}) == len(plans)


def test_a_drawn_moment_is_one_of_its_range_and_can_be_waited_for(config: Path) -> None:
    after = {"kind": "pause", "target": "server-1", "after": {"fault": 0, "seconds": 0.5}}
    kill, pause = plan(config, {"kind": "kill", "target": "server-0", **RANGE}, after)
    assert isinstance(kill.when, AtUpdates)
    assert 20 <= kill.when.updates < 60
    assert pause.when == After(0, 0.5)
    (late,) = plan(config, {**PAUSE, "at_seconds": {"between": [1, 3]}})
    assert isinstance(late.when, AtSeconds)
    assert 1 <= late.when.seconds < 3


def test_processes_by_gradients_and_like_published_systems(config: Path) -> None:
    kill = {"kind": "kill", "target": {"role": "server", "pick": "random"}}
    for fault in plan(config, {**kill, "every": {"updates": 10, "until": 80}}):
        assert isinstance(fault.when, AtUpdates)
        assert fault.when.optional
        assert fault.when.updates <= 80
    scale = {"hours_per_second": 1, "until": 60}
    sections = [
        EverySection.model_validate({"like": "llama3", **scale}),
        EverySection.model_validate({"like": "llama3", **scale, "failures_per_year": 100}),
        EverySection.model_validate({"like": "lanl", **scale, "hours_per_second": 4}),
    ]
    llama3, smaller, lanl = (section.build() for section in sections)
    assert llama3.mtbf == pytest.approx(54 * 24 / 419)  # hours, of which one is a second here
    assert smaller.mtbf == pytest.approx(365.25 * 24 / 100)
    assert lanl == Process(365.25 * 24 / 1000 / 4, 60, "weibull", 0.7)  # of which four are one
    assert plan(config, {**kill, "every": {"like": "lanl", "hours_per_second": 5, "until": 60}})


@pytest.mark.parametrize(
    ("moment", "told"),
    [
        ({"at_updates": {"between": [60, 20]}}, "at_updates.between: between 60 and 20 updates"),
        ({"at_updates": {"between": [0, 20]}}, "expected two numbers from 1"),
        ({"at_updates": {"between": [20, 102]}}, "between: the training ends after 100 updates"),
        ({"at_updates": {"between": [20]}}, "faults.0.at_updates.between.1: is missing"),
        ({"at_updates": {"betwen": [20, 30]}}, "did you mean 'between'?"),
        ({"at_updates": "soon"}, "expected a whole number, or {between: [200, 400]}; got 'soon'"),
        ({"at_seconds": "soon"}, "expected a number, or {between: [1, 3]}; got 'soon'"),
        ({"at_seconds": {"between": [1, 61]}}, "between: the time limit is 60 s"),
        ({"every": {"until": 9}}, "expected exactly one of mtbf, updates, like; got none of them"),
        ({"every": {"until": 9, "mtbf": 1, "updates": 3}}, "got mtbf and updates"),
        ({"every": {"until": 9, "like": "lan"}}, "unknown failure model 'lan'; did you mean"),
        ({"every": {"until": 9, "like": "lanl"}}, "every.hours_per_second: is missing"),
        (
            {"every": {"until": 9, "mtbf": 1, "hours_per_second": 1}},
            "every.hours_per_second: goes with like: only",
        ),
        (
            {"every": {"until": 9, "like": "lanl", "hours_per_second": 1, "shape": 0.8}},
            "follows from like:; leave out distribution and shape",
        ),
        (
            {"every": {"until": 9, "mtbf": 1, "distribution": "lognormal", "shape": 11.0}},
            "every.shape: shape=11.0 of a lognormal distribution, expected 10 at most",
        ),
    ],
)
def test_moments_that_cannot_be_drawn_are_refused(
    config: Path, moment: dict[str, Any], told: str
) -> None:
    assert told in complaint(config, {**PAUSE, **moment})


def test_the_rows_of_a_trace_are_part_of_the_trial(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("seconds,kind,target,duration\n1.5,pause,server-0,2\n")
    entry = {"kind": "trace", "csv": str(path)}
    one = trial(config, entry)
    pause = Pause(Seat("server-0"), AtSeconds(1.5, optional=True), 2.0)
    assert one.build_faults() == (pause,)
    path.write_text("seconds,kind,target,duration\n1.5,pause,server-0,3\n")
    # What was read is kept with the trial; what is read anew is another trial.
    assert TrialConfig.model_validate(one.model_dump(mode="json")).build_faults() == (pause,)
    assert trial(config, entry) != one
    path.write_text("seconds,kind,target,duration\n1.5,pause,server-7,3\n")
    assert "faults.0.csv: row 1, column 'target': there is no node 'server-7'" in complaint(
        config, entry
    )
    path.unlink()
    assert "faults.0.csv" in complaint(config, entry)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (PAUSE, "expected exactly one moment of at_updates, at_seconds, phase, after, every; got"),
        ({**PAUSE, **NOW, "at_updates": 1}, "got at_updates and at_seconds"),
        ({**PAUSE, "at_seconds": -1}, "faults.0.at_seconds: expected at least 0.0, got -1"),
        ({**PAUSE, "phase": "lunch"}, "unknown phase 'lunch'"),
        ({**PAUSE, "after": {"fault": 3}}, "there is no fault 3; expected 0 to 0"),
        ({**PAUSE, "after": {"fault": 0}}, "fault 0 would come after itself"),
        ({**PAUSE, "phase": "recovery"}, "no other fault of the plan takes a shard down"),
        ({**PAUSE, **NOW, "target": 5}, "faults.0.target: expected the name of a node, a list"),
        ({**PAUSE, **NOW, "target": []}, "faults.0.target: expected the name of a node, a list"),
        ({**PAUSE, **NOW, "target": "server-9"}, "there is no node 'server-9' to pause"),
        ({**PAUSE, **NOW, "target": ["server-0"] * 2}, "a node is named twice"),
        ({**PAUSE, **NOW, "target": {"shard": 2}}, "there is no shard 2; expected 0 to 1"),
        ({**PAUSE, **NOW, "target": {"shard": 0, "position": 1}}, "a chain of 1 has no position"),
        ({**PAUSE, **NOW, "target": {"shard": 0, "position": "middle"}}, "has no middle"),
        ({**PAUSE, **NOW, "target": {"shard": 0, "position": "top"}}, "expected head, middle"),
        ({**PAUSE, **NOW, "target": {"role": "worker", "shard": 0}}, "expected {role, index}"),
        ({**PAUSE, **NOW, "target": {"index": 0}}, "expected {role, index}, {shard, position}"),
        ({**PAUSE, **NOW, "target": {"role": "boss"}}, "unknown role 'boss'"),
        ({**PAUSE, **NOW, "target": {"role": "worker", "index": 2}}, "no node 'worker-2'"),
        ({**PAUSE, **NOW, "target": {"role": "spare", "pick": "all"}}, "there is no spare to"),
        (
            {**PAUSE, **NOW, "target": {"role": "server", "pick": "each"}},
            "target.pick: each node has moments of its own only with every:",
        ),
        (
            {**PAUSE, "target": {"pick": "each"}, "every": {"mtbf": 5, "until": 60}},
            "each is of a role; expected {role: server, pick: each}",
        ),
        ({**PAUSE, **NOW, "target": {"rol": "worker"}}, "faults.0.target.rol: unknown key"),
        ({**PAUSE, "every": {"mtbf": 5}}, "faults.0.every.until: is missing"),
        (
            {**PAUSE, "every": {"mtbf": 5, "until": 9, "shape": 2.0}},
            "weibull or lognormal has a shape",
        ),
        ({"kind": "corrupt", "shard": 2, **NOW}, "faults.0.shard: there is no shard 2"),
        ({**PAUSE, "kind": "slow", **NOW, "factor": 1}, "expected more than 1"),
        ({"kind": "trace", "csv": "nowhere.csv"}, "nowhere.csv: cannot be read"),
        (
            {"kind": "flap", "target": "server-0", "every": {"mtbf": 1, "until": 9}},
            "flapping recurs by itself",
        ),
        (
            {**PAUSE, "kind": "kill", "back_after": None, "every": {"mtbf": 1, "until": 9}},
            "what is never replaced cannot be killed again",
        ),
        (
            {"kind": "corrupt", "shard": 0, "every": {"mtbf": 1e-3, "until": 99}},
            "more than 1000 faults within 99 s",
        ),
    ],
)
def test_what_cannot_happen_is_refused(config: Path, fault: dict[str, Any], told: str) -> None:
    assert told in complaint(config, fault)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({**PAUSE, "phase": "checkpoint"}, "faults.0.phase: no checkpoints are written"),
        ({"kind": "corrupt", "shard": 0, **NOW}, "faults.0.shard: no checkpoints are written"),
        ({**PAUSE, "kind": "disk_full", **NOW}, "faults.0.kind: nothing is written to disk"),
    ],
)
def test_what_needs_checkpoints_is_refused_without(
    config: Path, fault: dict[str, Any], told: str
) -> None:
    assert told in complaint(config, fault, recovery="chain")


def test_strategies_without_the_checkpoints_that_a_fault_needs_are_named(config: Path) -> None:
    corrupt = "axes.faults={broken: [{kind: corrupt, shard: 0, at_updates: 5}]}"
    with pytest.raises(ConfigurationError) as caught:
        load_experiment(str(config), ["axes.recovery=[checkpoint, chain, none]", corrupt])
    assert "'broken': 0.shard: no checkpoints are written" in str(caught.value)
    assert "None are by chain, none: `exclude`" in str(caught.value)


def test_a_kill_of_so_many_seconds_may_be_meant_in_two_ways(config: Path) -> None:
    said = complaint(config, {"kind": "kill", "target": "server-0", **NOW, "seconds": 3})
    assert "faults.0.seconds: unknown key; did you mean 'back_after'" in said
    assert "'at_seconds'" in said


def test_a_checkpoint_on_virtual_time_cannot_be_hit(config: Path) -> None:
    written = config.read_text()
    config.write_text(f"{written}\ncluster: {{kind: virtual}}\n")
    said = complaint(config, {**PAUSE, "phase": "checkpoint"})
    assert "faults.0.phase: a checkpoint on virtual time is written at once" in said


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"kind": "corrupt", "shard": 0, **NOW}, "faults.0.shard: only checkpoints in files of"),
        ({**PAUSE, "kind": "disk_full", **NOW}, "faults.0.kind: only writes to files of this"),
        ({**PAUSE, "phase": "checkpoint"}, "faults.0.phase: only checkpoints in files of this"),
    ],
)
def test_what_needs_files_is_refused_where_there_are_none(
    config: Path, fault: dict[str, Any], told: str
) -> None:
    elsewhere = f"{{durability: {{kind: checkpoint, every: 10, path: '{SCHEME}://far/away'}}}}"
    said = complaint(config, fault, recovery=elsewhere)
    assert told in said
    assert "expected a folder as recovery.durability.path" in said


def test_stores_may_be_full_and_unreachable(config: Path) -> None:
    full = {"kind": "disk_full", "target": "store-0", **NOW}
    cut = {"kind": "cut", "target": {"role": "store"}, **NOW}
    assert len(plan(config, full, cut, recovery="stateless")) == 2


def test_faults_in_a_circle_are_refused(config: Path) -> None:
    circle = [{**PAUSE, "after": {"fault": other}} for other in (1, 2, 0)]
    assert "faults.0.after.fault: fault 0 would come after itself" in complaint(config, *circle)
    often = {**PAUSE, "every": {"mtbf": 5, "until": 9}}
    after = {**PAUSE, "after": {"fault": 0}}
    assert "fault 0 stands for any number of faults" in complaint(config, often, after)


def test_who_is_gone_by_then_cannot_be_hit_but_places_can(config: Path) -> None:
    kill = {**PAUSE, "kind": "kill", **NOW}
    after = {**PAUSE, "after": {"fault": 0, "seconds": 1}}
    told = complaint(config, kill, after)
    assert "faults.1.target: there is no node 'server-0' to pause then; did you mean" in told
    assert "server-0-b" in told
    for target in ("server-0-b", {"shard": 0}, {"role": "server"}):
        assert len(plan(config, kill, {**after, "target": target})) == 2
    # Nobody knows which of the two comes first.
    assert len(plan(config, kill, {**PAUSE, "at_updates": 5})) == 2


def test_who_is_restored_has_no_place_in_a_chain(config: Path) -> None:
    kill = {**PAUSE, "kind": "kill", **NOW}
    head = {**PAUSE, "target": {"shard": 0}, "phase": "recovery"}
    assert "has no replica while it is restored" in complaint(config, kill, head)
    assert len(plan(config, kill, head, recovery="chain")) == 2
    assert len(plan(config, kill, {**head, "target": {"role": "server"}})) == 2


def test_a_fault_after_the_time_limit_is_late(config: Path) -> None:
    found = trial(config, {**PAUSE, "at_seconds": 60}, {**PAUSE, "at_seconds": 59})
    ((fault, end),) = found.late_faults
    assert (fault.when, end) == (AtSeconds(60.0), "the time limit is 60 s")


SLURM = {"kind": "slurm", "memory": "1GB"}
KILL = {"kind": "kill", "target": "server-0", "at_updates": 5}


def on_slurm(path: Path, *faults: dict[str, Any]) -> TrialConfig:
    overrides = [f"faults={json.dumps(faults)}", f"cluster={json.dumps(SLURM)}"]
    ((_, only),) = load_experiment(str(path), overrides).trial_configs()
    return only


def test_jobs_are_killed_in_three_ways(config: Path) -> None:
    ways = [KILL, {**KILL, "by": "requeue"}, {**KILL, "by": "host", "back_after": 2.0}]
    plans = [on_slurm(config, way).build_faults() for way in ways]
    assert plans == [
        (Kill("server-0", AtUpdates(5)),),
        (Kill("server-0", AtUpdates(5), by="requeue"),),
        (Kill("server-0", AtUpdates(5), 2.0, "host"),),
    ]


@pytest.mark.parametrize("way", ["requeue", "host"])
def test_what_no_queueing_system_can_do_is_refused_before_anything_runs(
    config: Path, way: str
) -> None:
    with pytest.raises(ConfigurationError, match=r"faults\.0\.by.*killed by signal; .*slurm"):
        plan(config, {**KILL, "by": way})


def test_a_requeued_job_comes_back_by_itself(config: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"back_after.*comes back by itself"):
        on_slurm(config, {**KILL, "by": "requeue", "back_after": None})


def test_who_may_be_on_the_host_that_is_lost_may_be_hit_when_back(config: Path) -> None:
    again = {"kind": "pause", "target": "server-1-b", "after": {"fault": 0, "seconds": 2}}
    assert len(on_slurm(config, {**KILL, "by": "host"}, again).build_faults()) == 2
    with pytest.raises(ConfigurationError, match="server-1-b"):
        on_slurm(config, KILL, again)


def test_each_node_of_a_role_fails_by_itself_in_trials_that_have_some(config: Path) -> None:
    """A strategy without such nodes meets no such faults: that is no mistake."""
    every = {"mtbf": 5, "until": 60}
    of_servers = {"kind": "kill", "target": {"role": "server", "pick": "each"}, "every": every}
    of_stores = {"kind": "delay", "target": {"role": "store", "pick": "each"}, "every": every}
    without = trial(config, of_servers, of_stores, recovery="checkpoint").build_faults()
    assert {fault.target for fault in without} == {Seat("server-0"), Seat("server-1")}
    with_store = trial(config, of_servers, of_stores, recovery="stateless").build_faults()
    assert with_store[: len(without)] == without
    assert {fault.target for fault in with_store[len(without) :]} == {Seat("store-0")}
