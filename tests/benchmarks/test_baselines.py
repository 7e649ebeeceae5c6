"""dps beside other systems: each program for real, proof of the kill, and what the table says."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from benchmarks.baselines import trials
from benchmarks.baselines.comparison import Comparison, row_of, table
from benchmarks.baselines.counting import Kill as Kind
from benchmarks.baselines.counting import trial as counted
from benchmarks.baselines.program import Kill, Ran, read_trace, run
from benchmarks.baselines.task import COUNT, TRACE_FILE, Gradients, Task, Trace, snapshots
from benchmarks.baselines.trials import (
    Measured,
    Settings,
    judged,
    measure,
    task_of,
    trials_of,
)
from flows.execution.training import initial
from tests.support.needs_torch import needs_torch

needs_ray = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra `bench` is not installed"),
]
QUICK = Settings(
    updates=200,
    compute_seconds=0.003,
    learning_rate=0.1,
    target=0.85,
    every=20,
    first_kill=40,
    back_after=0.1,
    snapshot_seconds=0.05,
)
SEED = 3


def small_task(folder: Path, settings: Settings = QUICK) -> Task:
    config = trials_of(SEED, settings)["none", False].config
    task = task_of(config, settings, folder)
    task.write()
    return task


# -- what is the same for all --------------------------------------------------------------------


def test_dps_and_a_baseline_are_told_the_same(tmp_path: Path) -> None:
    of_dps = trials_of(SEED, QUICK)
    assert {name for name, _ in of_dps} == {"none", "checkpoint", "chain(2)", "stateless"}
    for (_, killed), trial in of_dps.items():
        plan = trial.config.fault_plan
        assert len(plan) == killed
        if killed:
            assert plan[0].target == "server-0"
            assert plan[0].when.updates == QUICK.kill_at(SEED)
            assert plan[0].back_after == QUICK.back_after
        assert trial.config.optimizer.build().learning_rate == QUICK.learning_rate
        assert trial.config.server.shards == 1
    config = of_dps["none", False].config
    task = task_of(config, QUICK, tmp_path / "x")
    weights, done = task.restore()
    assert done == [0, 0]
    for name, array in initial(config).items():
        np.testing.assert_array_equal(weights[name], array)
    assert (task.updates, task.workers, task.batch_size) == (200, 2, 32)
    assert [task.share(0), task.share(1)] == [100, 100]


# -- programs for real ---------------------------------------------------------------------------


def reference(task: Task) -> dict[str, np.ndarray]:
    """Plain SGD over the batches of both workers in turn."""
    weights, _ = task.restore()
    each = [Gradients(replace(task, compute_seconds=0.0), worker) for worker in (0, 1)]
    for number in range(task.updates):
        for name, gradient in each[number % 2].next(weights).items():
            weights[name] -= task.learning_rate * gradient
    return weights


def test_a_single_process_that_is_killed_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path,
) -> None:
    task = small_task(tmp_path / "x")
    ran = run("benchmarks.baselines.single_process", task, QUICK.kill_at(SEED))
    assert ran.unfinished == ""
    kill = ran.kill
    assert kill is not None
    assert kill.gone
    assert kill.version >= QUICK.kill_at(SEED)
    applied = [event for event in read_trace(task.path) if event["event"] == "applied"]
    pids = list(dict.fromkeys(event["pid"] for event in applied))
    assert pids[0] == kill.pid
    assert len(pids) == 2
    last = max(event["version"] for event in applied if event["pid"] == kill.pid)
    first = next(event["version"] for event in applied if event["pid"] != kill.pid)
    assert first == last // QUICK.every * QUICK.every + 1  # from the newest checkpoint
    assert applied[-1]["version"] == task.updates
    *_, (_, weights) = snapshots(task.path)
    for name, array in reference(replace(task, folder=str(tmp_path / "none"))).items():
        np.testing.assert_allclose(weights[name], array, rtol=1e-6)


def again(system: str) -> bool:
    return trials.BASELINES[system].again


@pytest.mark.cluster
@pytest.mark.parametrize(
    "system",
    [
        pytest.param("Ray actors", marks=needs_ray),
        pytest.param("torch RPC", marks=[*needs_torch, pytest.mark.slow]),
    ],
)
def test_a_system_of_an_extra_goes_on_from_its_checkpoint(system: str, tmp_path: Path) -> None:
    found = measure(system, SEED, True, QUICK, tmp_path / "x")
    assert found.reason == ""
    assert found.lost is not None
    assert found.lost < QUICK.every + 5
    assert found.down_seconds is not None
    assert found.down_seconds > QUICK.back_after
    versions = [e["version"] for e in read_trace(tmp_path / "x") if e["event"] == "applied"]
    end = QUICK.updates - (0 if again(system) else found.lost)
    assert versions[-1] in (end, end + 1)  # a call that Ray repeats may be applied twice


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed")
def test_replicas_of_torchft_go_on_without_the_one_that_was_killed(tmp_path: Path) -> None:
    found = measure("torchft", SEED, True, QUICK, tmp_path / "x")
    assert found.reason == ""
    assert found.lost == 0
    assert found.down_seconds is not None
    versions = [e["version"] for e in read_trace(tmp_path / "x") if e["event"] == "applied"]
    assert versions == sorted(versions)
    assert versions[-1] in (QUICK.updates, QUICK.updates + 1)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(("strategy", "most"), [("checkpoint", 25), ("chain(2)", 0)])
def test_dps_is_measured_by_its_record(strategy: str, most: int, tmp_path: Path) -> None:
    found = measure(f"dps, {strategy}", SEED, True, QUICK, tmp_path / "x")
    assert found.reason == ""
    assert found.lost is not None
    assert found.lost <= most
    assert found.down_seconds is not None
    assert found.target_seconds is not None
    machines = 4 if strategy == "chain(2)" else 3
    assert found.target_usd == pytest.approx(machines * 0.0816 * found.target_seconds / 3600)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("system", "kill"),
    [
        ("single process", "worker"),
        ("dps, chain(2)", "worker"),
        pytest.param("dps, checkpoint", "server", marks=pytest.mark.slow),
        pytest.param("Ray actors", "worker", marks=needs_ray),
        pytest.param("torch RPC", "worker", marks=[*needs_torch, pytest.mark.slow]),
    ],
)
def test_each_example_is_counted(system: str, kill: Kind, tmp_path: Path) -> None:
    found = counted(system, SEED, kill, QUICK, tmp_path / "x", epochs=5)
    assert found.reason == ""
    assert found.examples == 5 * 1408
    assert (found.lost, found.repeated) == (0, 0)


def test_examples_of_a_worker_that_starts_again_are_counted_as_repeated(tmp_path: Path) -> None:
    task = replace(small_task(tmp_path / "x"), epochs=1)
    weights = task.initial()
    for worker in (0, 1, 0):
        for name, gradient in Gradients(task, worker).next(weights).items():
            weights[name] -= task.learning_rate * gradient
    counts = np.rint(weights[COUNT])
    assert np.bincount(counts.astype(int)).tolist() == [1408 - 64, 32, 32]


# -- trials that count for nothing ---------------------------------------------------------------


def traced(tmp_path: Path, lines: list[dict[str, object]]) -> Path:
    """A folder with a trace and one snapshot of the initial weights."""
    task = small_task(tmp_path / "x")
    Trace(task).ended(task.restore()[0])
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (task.path / TRACE_FILE).write_text(text)
    return task.path


def line(t: float, version: int, pid: int) -> dict[str, object]:
    return {"t": t, "event": "applied", "pid": pid, "version": version}


BEGAN: dict[str, object] = {"t": 10.0, "event": "began", "pid": 7}
BEFORE = [BEGAN, *(line(10.0 + v / 100, v, 7) for v in range(1, 46))]
AFTER = [line(11.5 + v / 100, v, 8) for v in range(41, 60)]


def test_what_was_lost_is_what_the_victim_had_applied(tmp_path: Path) -> None:
    config = trials_of(SEED, QUICK)["none", False].config
    folder = traced(tmp_path, [*BEFORE, *AFTER])
    found = judged("Ray actors", config, True, Ran(Kill(10.44, 7, 44, True)), folder)
    assert found.reason == ""
    assert found.lost == 5  # 41 to 45: one more had been applied by the time of the signal
    assert found.kill_version == 44
    assert found.down_seconds == pytest.approx(11.91 - 10.44)
    assert found.target_seconds is found.target_usd is None


# -- the comparison ------------------------------------------------------------------------------


def trial(seed: int, killed: bool, seconds: float | None, reason: str = "") -> Measured:
    usd = None if seconds is None else seconds / 1e6
    lost, down = (7 + seed, 2.0) if killed else (None, None)
    return Measured("torch RPC", seed, killed, reason, seconds, usd, 9.0, 0.9, 250, lost, down)


PAIRS = [(3.0, 7.0), (4.0, 9.0), (5.0, 8.0)]
TRIALS = [trial(s, k, p[k]) for s, p in enumerate(PAIRS) for k in (False, True)]


def test_an_effect_is_the_difference_to_the_control_of_the_same_seed() -> None:
    row = row_of("torch RPC", TRIALS)
    assert row.effect_seconds is not None
    assert row.effect_seconds.mean == pytest.approx(4.0)
    # Student's t with 2 degrees of freedom: 4.303 * sd / sqrt(3), of 4, 5 and 3.
    assert row.effect_seconds.high == pytest.approx(4.0 + 4.3027 / 3**0.5, rel=1e-4)
    assert row.lost == 8
    assert row.reached == (3, 3)


def test_an_invalid_trial_is_named_and_does_not_count() -> None:
    found = [*TRIALS[:-1], trial(2, True, 8.0, "invalid: the server was not killed")]
    row = row_of("torch RPC", found)
    assert row.invalid == 1
    assert row.effect_seconds is not None
    assert row.effect_seconds.n == 2
    text = table(Comparison(Settings(), [0, 1, 2], found, {"Ray actors": "not installed"}, (0, 0)))
    assert "torch RPC, kill, seed 2 is left out: invalid: the server was not killed" in text
    assert "Ray actors is left out: not installed" in text
