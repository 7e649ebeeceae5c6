"""The preview of an experiment."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from flows.config.experiment import load_experiment
from flows.config.trials import Trial, expand
from flows.execution.plan import (
    budgets_told,
    claims_without_faults,
    fault_plans,
    nodes_needed,
    plan_table,
    recorded_in,
    warnings,
)
from flows.monitor.estimate import Durations
from flows.records.settings import trial_from
from tests.support.virtual_trials import virtual_trial


def demo(*overrides: str) -> tuple[Trial, ...]:
    return expand(load_experiment("demo", overrides))


def test_table_has_a_line_per_trial() -> None:
    trials = demo()
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(plan_table(trials, [trials[0].name]))
    lines = console.export_text().splitlines()
    assert len(lines) == 1 + len(trials)
    assert lines[1].rstrip().endswith("recorded")
    assert lines[2].rstrip().endswith("to run")
    assert re.search(r"kill server-0 at (2[5-9]|3[0-4])\d", lines[4])


def test_nodes_needed_are_those_of_the_largest_trial() -> None:
    text = nodes_needed(demo("server.spares=1", "training.workers=3"))
    assert "at most: 9 (2 server, 2 replica, 1 spare, 3 worker, 1 evaluator)" in text


def test_how_each_strategy_uses_its_budget_is_told() -> None:
    assert budgets_told(demo()) == []
    assert budgets_told(demo("budget={nodes: 4}", "seeds=[0]", "axes.faults=[[]]"))[1:] == [
        "  4 for none: 2 server, 2 spare",
        "  4 for checkpoint: 2 server, 2 spare",
        "  4 for chain: 2 server, 2 replica",
        "  4 for stateless: 2 server, 1 spare, 1 store",
    ]


def test_the_moments_that_each_seed_draws_are_told() -> None:
    kill = "{kind: kill, target: server-0, at_updates: {between: [200, 400]}}"
    lines = fault_plans(demo("axes={recovery: [chain, none]}", f"faults=[{kill}]", "seeds=[0, 1]"))
    assert lines[0::2] == [
        "Faults of chain.seed-0, none.seed-0:",
        "Faults of chain.seed-1, none.seed-1:",
    ]
    assert lines[1] != lines[3]
    assert all(line.startswith("  0: kill server-0 at ") for line in lines[1::2])


def test_a_kill_that_never_comes_is_a_warning() -> None:
    assert warnings(demo()) == []
    late = "axes.faults={kill: [{kind: kill, target: server-0, at_updates: 900}]}"
    (warning,) = warnings(demo(late, "axes.recovery=[chain]"))
    assert "the kill of server-0 at 900 updates never comes" in warning
    assert warning.endswith("chain.kill.seed-0, chain.kill.seed-1, chain.kill.seed-2")


@pytest.mark.parametrize(
    ("metric", "against", "condition", "warned"),
    [
        ("rto_seconds", "none", "no fault", "chain with faults 'no fault' has none"),
        ("rto_seconds", "{faults: no fault}", "kill", "chain with faults 'no fault' has none"),
        ("effect_time_mean", "none-given", "no fault", "effect_time_mean is of faults"),
        ("rto_seconds", "none", "kill", ""),
        ("accuracy_final", "none", "no fault", ""),
    ],
    ids=["recovery", "other condition", "effect", "with faults", "of any trial"],
)
def test_a_claim_on_what_only_faults_do_is_a_warning_where_there_are_none(
    metric: str, against: str, condition: str, warned: str
) -> None:
    claim = (
        f"claims=[{{metric: {metric}, strategy: chain, against: {against}, "
        f"condition: {condition}, direction: more, smallest: 0.1}}]"
    )
    axes = "axes.faults={no fault: [], kill: [{kind: kill, target: server-0, at_updates: 200}]}"
    settings = [axes, "axes.recovery=[none, chain]", claim]
    found = claims_without_faults(load_experiment("demo", settings), demo(*settings))
    assert len(found) == bool(warned)
    assert all(line.startswith("claims.0: ") and warned in line for line in found)


def test_how_long_a_single_fault_lasts_is_told_too() -> None:
    pause = "{kind: pause, target: server-0, at_updates: 100, seconds: 2}"
    trials = demo("axes={}", f"faults=[{pause}]", "seeds=[0]")
    assert fault_plans(trials) == [
        "Faults of seed-0:",
        "  0: pause server-0 at 100 updates, for 2 s",
    ]


def test_what_does_not_fit_in_a_cell_is_told_below() -> None:
    assert fault_plans(demo("axes={}", "faults=[]")) == []
    every = "{kind: kill, target: server-0, every: {mtbf: 4, until: 30}}"
    more = "{kind: delay, target: {role: worker}, phase: recovery}"
    trials = demo("axes={recovery: [chain, none]}", f"faults=[{every}, {more}]", "seeds=[0]")
    heading, *lines = fault_plans(trials)
    assert heading == "Faults of chain.seed-0, none.seed-0:"
    assert lines[0].startswith("  0: kill server-0 or its replacement at ")
    assert lines[0].endswith(" s, replaced after 1 s")
    assert lines[-1] == (
        f"  {len(lines) - 1}: delay worker-0 or its replacement while a shard is restored, "
        "each message by 0.05 s, for 2 s"
    )
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(plan_table(trials, []))
    assert f"{len(lines)} faults" in console.export_text()


def test_how_long_trials_took_on_virtual_time_tells_nothing_of_how_long_they_run(
    tmp_path: Path,
) -> None:
    record = virtual_trial(tmp_path / "a-trial").record
    assert record.started is not None
    durations, trial = Durations(), trial_from(record.started.settings, "here")
    assert [name for name, _ in recorded_in(tmp_path, [trial], durations)] == ["a-trial"]
    assert durations.known == 0
