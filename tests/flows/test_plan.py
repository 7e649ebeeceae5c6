"""The preview of an experiment."""

from __future__ import annotations

import io

from rich.console import Console

from flows.config import load_experiment
from flows.grid import Trial, expand
from flows.plan import nodes_needed, plan_table, warnings


def demo(*overrides: str) -> tuple[Trial, ...]:
    return expand(load_experiment("demo", overrides))


def test_table_has_a_line_per_trial() -> None:
    trials = demo()
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(plan_table(trials, trials[:1]))
    lines = console.export_text().splitlines()
    assert len(lines) == 1 + len(trials)
    assert lines[1].rstrip().endswith("recorded")
    assert lines[2].rstrip().endswith("to run")
    assert "kill server-0 at 300" in lines[3]


def test_nodes_needed_are_those_of_the_largest_trial() -> None:
    text = nodes_needed(demo("server.spares=1", "training.workers=3"))
    assert "at most: 9 (2 server, 2 replica, 1 spare, 3 worker, 1 evaluator)" in text


def test_a_kill_that_never_comes_is_a_warning() -> None:
    assert warnings(demo()) == []
    (warning,) = warnings(demo("training.updates=200", "axes.recovery=[chain]"))
    assert "the kill of server-0 at 300 updates never comes" in warning
    assert warning.endswith("invalid: chain.kill.seed-0, chain.kill.seed-1")
