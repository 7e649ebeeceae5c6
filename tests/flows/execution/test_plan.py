"""The preview of an experiment."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from flows.config.experiment import TrialConfig, load_experiment
from flows.config.trials import Trial, digest, expand
from flows.execution.plan import fault_plans, plan_table, queue_needs
from flows.execution.preflight import recorded_in
from flows.monitor.estimate import Durations
from tests.support.virtual_trials import BASE, virtual_trial


def demo(*overrides: str) -> tuple[Trial, ...]:
    return expand(load_experiment("demo", overrides))


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
    virtual_trial(tmp_path / "a-trial")
    config = TrialConfig.model_validate(BASE)
    durations, trial = Durations(), Trial("a-trial", "", {}, config.seed, config, digest(config))
    assert [name for name, _ in recorded_in(tmp_path, [trial], durations)] == ["a-trial"]
    assert durations.known == 0


def test_a_queue_is_told_its_jobs_and_core_hours(tmp_path: Path) -> None:
    queue = "cluster={kind: slurm, cores: 2, memory: 2GB, interface: lo}"
    trials = expand(load_experiment("demo", [queue, "seeds=3"]))
    jobs = sum(len(trial.config.node_names) for trial in trials)
    durations = Durations()
    hours = sum(2 * len(t.config.node_names) * durations.of(t) for t in trials) / 3600
    (line,) = queue_needs(trials, durations)
    assert line == f"Queue: {jobs} jobs, about {hours:.1f} core-hours."
    assert not queue_needs(expand(load_experiment("demo")), durations)
