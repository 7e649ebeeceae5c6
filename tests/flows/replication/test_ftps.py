"""The replication of Pampari and Patel: what is measured on records, and what is claimed by it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from dps.events import (
    Acked,
    Applied,
    Detected,
    Evaluated,
    Event,
    Killed,
    Reported,
    Restored,
    TrainingStarted,
    TrialEnded,
    TrialResumed,
    TrialStarted,
)
from flows.analysis.finished import RESULTS, read_finished
from flows.analysis.outcome import outcome
from flows.analysis.prices import load_prices
from flows.cli import replicate
from flows.config.experiment import ExperimentConfig, load_experiment
from flows.config.trials import expand
from flows.execution.attempt import Attempt, end_unfinished
from flows.execution.experiment import Ran
from flows.records.record import EVENTS_FILE, Record
from flows.replication.claims import judged
from flows.replication.ftps import claims
from flows.replication.ftps import run as replicate_ftps
from flows.replication.ftps.claims import failure_findings, scaling_findings
from flows.replication.ftps.measures import Measured
from flows.replication.ftps.run import FAILURE, SCALING, experiment, reading
from flows.replication.version import Version

STEP, WORKERS = 0.1, 2


def measured(
    seed: int = 0,
    servers: int = 1,
    workers: int = WORKERS,
    at: int | None = None,
    step: float = STEP,
) -> Measured:
    """A trial of 100 iterations; the loss at iteration `at` takes 0.5 s and goes back 4 of them.

    Accuracy rises by 0.1 points in an iteration.
    """
    faults = [] if at is None else [{"kind": "kill", "at_updates": at * workers}]
    config: dict[str, Any] = {
        "training": {"workers": workers, "batch_size": 128},
        "server": {"shards": servers},
        "faults": faults,
    }
    settings = {"trial": "t", "experiment": "e", "labels": {}, "seed": seed, "config": config}
    events: list[Event] = [
        TrialStarted(0.0, "t", settings, {}),
        TrainingStarted(0.0, workers, servers, 785),
    ]
    t, reached = 0.0, 0
    for iteration in range(1, 101):
        t += step
        if iteration == at:
            events += [
                Killed(t - 0.05, 0, "server-0", 1, at * workers, True),
                Detected(t - 0.04, 0, 2, "server-0", False, "client"),
                Restored(t + 0.3, 0, 2, "spare-0", (at - 5) * workers, "checkpoint"),
            ]
            t, reached = t + 0.5, reached - 4
            column: dict[str, Any] = {"times": (t,), "workers": ("worker-0",), "incarnations": (1,)}
            column |= {"seqs": (at,), "versions": (0,), "staleness": (0,)}
            column |= {"staleness_seconds": (0.0,), "replayed": (False,)}
            events.append(Applied(t, "spare-0", 0, 2, True, **column))
        reached += 1
        for worker in (f"worker-{i}" for i in range(workers)):
            events.append(Reported(t, worker, 1, "loss", (t,), (iteration,), (1.0,)))
        events.append(Evaluated(t + 0.01, reached * workers, 1.0, 0.5 + reached / 1000))
    events += [
        Acked(t, "worker-0", 1, (t,), (0,), (100,), (0,), ("applied",)),
        TrialEnded(t, "valid", ""),
    ]
    record = Record(tuple(events))
    return Measured(record, outcome(record, load_prices()))


@pytest.mark.slow
def test_the_time_of_an_iteration_and_of_the_one_that_fails() -> None:
    trial = measured(at=40)
    assert trial.iteration_seconds == pytest.approx(STEP)
    assert trial.samples_per_second == pytest.approx(128 * WORKERS / STEP)
    assert trial.failing_iteration_seconds == pytest.approx(0.6)
    assert measured().failing_iteration_seconds is None


def test_accuracy_lost_at_once_and_regained() -> None:
    trial, quiet = measured(at=40), measured()
    assert (trial.failure_at, quiet.failure_at) == (40, None)
    # Iteration 39 was the last one; what serves next has 35 of them and one more.
    assert trial.drop() == pytest.approx(0.003)
    assert quiet.drop(40) == pytest.approx(-0.001)
    assert trial.iterations_to_regain == pytest.approx(4)


def test_a_record_that_begins_in_the_middle_is_not_compared() -> None:
    trial = measured()
    first, *rest = trial.record.events
    record = Record((first, TrialResumed(0.0, "checkpoints", 40), *rest))
    assert trial.comparable
    assert not Measured(record, outcome(record, load_prices())).comparable


def test_an_evaluation_long_before_a_failure_is_none_before_it() -> None:
    trial = measured(at=40)
    began = trial.fault.began if trial.fault else 0.0
    events = trial.record.events
    behind = [e for e in events if not (isinstance(e, Evaluated) and began - 0.5 < e.t < began)]
    late = Measured(Record(tuple(behind)), trial.outcome)
    assert (late.before, late.drop(), late.iterations_to_regain) == (None, None, None)


def test_accuracy_by_iteration_is_that_of_the_way_that_counts() -> None:
    line = measured(at=40).accuracy_by_iteration(50)
    assert list(line) == list(range(1, 51))
    assert line[37] == pytest.approx(0.537)


def test_failures_are_compared_with_trials_of_the_same_seed() -> None:
    trials = [measured(seed, at=at) for seed in range(8) for at in (None, 40, 60)]
    part = failure_findings(trials)
    found = {claim.claim.split(":")[0]: claim for claim in judged(part.claims)}
    assert found["The loss costs accuracy at once"].found.startswith("0.40 points (99% interval")
    assert found["The loss costs accuracy at once"].verdict == "holds"
    # It costs exactly as much in every seed: that it costs less is neither shown nor excluded.
    assert found["A later loss costs less"].verdict == "not resolved"
    assert found["Accuracy is regained within 5 iterations"].verdict == "holds"
    assert found["The failing iteration takes longer"].found.startswith("6.00 ")
    assert found["The final accuracy is lower than without a failure"].verdict == "holds"
    assert [row[0] for row in part.tables[0].rows] == ["40", "60"]


def test_iterations_are_compared_with_one_server_and_one_worker() -> None:
    trials = [
        measured(seed, servers, workers, step=step * (1 + seed / 10))
        for seed in range(8)
        for servers, workers, step in ((1, 1, 0.1), (1, 4, 0.2), (4, 4, 0.16), (4, 1, 0.1))
    ]
    part = scaling_findings(trials)
    found = judged(part.claims)
    assert [claim.found.split()[0] for claim in found] == ["2.00", "0.50", "1.25"]
    assert {claim.verdict for claim in found} == {"holds"}
    cells = [row[0].replace("\u00a0", " ") for row in part.tables[0].rows]
    assert cells == ["1 × 1", "1 × 4", "4 × 1"]


def test_a_cell_that_shares_no_seed_with_one_server_and_one_worker_is_shown_without_a_speed() -> (
    None
):
    part = scaling_findings([measured(0, 1, 1), measured(1, 1, 4)])
    assert [row[2] for row in part.tables[0].rows] == ["1.00 (one seed)", "–"]
    assert [dot.x for dot in part.charts[0].lines["1 server"]] == [1]


@pytest.mark.parametrize("config", [SCALING, FAILURE])
def test_the_short_version_is_a_smaller_one_of_the_same_grid(config: str) -> None:
    whole, short = experiment(config, Version(full=True)), experiment(config, Version())
    assert whole == load_experiment(config)
    assert short.experiment == f"{whole.experiment}-short"
    assert {key: list(axis) for key, axis in short.axes.items()} == {
        key: list(axis) for key, axis in whole.axes.items()
    }
    for _, trial in short.trial_configs():
        assert not trial.late_faults
    assert len(short.seeds) < len(whole.seeds)


def test_how_claims_are_judged_is_said() -> None:
    assert "corrected by Holm's method for all 10 claims" in reading(10)


def test_trials_that_failed_are_named_and_end_the_command_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ran(experiment: ExperimentConfig, here: Path, *_: object, resume: bool) -> Ran:
        assert not resume, "a record that begins in the middle is not compared"
        trial = expand(experiment)[0]
        folder = here / RESULTS / experiment.experiment / trial.name
        end_unfinished(Attempt(trial, folder), "the store burnt down")
        return Ran((read_finished(folder / EVENTS_FILE, load_prices()),), folder, tracked=True)

    monkeypatch.setattr(replicate_ftps, "run_experiment", ran)
    monkeypatch.setattr(claims, "PARAMETERS", (785,))  # the ring is not what this is about
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.Exit) as ended:
        replicate.ftps()
    assert ended.value.exit_code == 1
    shown = capsys.readouterr()
    assert shown.err.count(" failed: the store burnt down\n") == 2
    assert "Page: " in shown.out


@pytest.mark.slow
def test_the_command_says_what_it_repeats() -> None:
    command = [sys.executable, "-m", "flows.cli", "replicate", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Pampari and Patel" in shown
