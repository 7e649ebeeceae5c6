"""The flow behind `dps run`, on records of toy trials and a real tracking store."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from rich.console import Console

from dps.errors import ConfigurationError
from dps.events import Event
from flows.config.experiment import ExperimentConfig
from flows.config.trials import Trial, expand
from flows.execution.attempt import Again, Attempt
from flows.execution.experiment import Ran, _attempts, run_experiment
from flows.monitor.progress import PlainView
from flows.records.events import TrialEnded, TrialResumed, TrialStarted
from flows.records.record import EARLIER, EVENTS_FILE, event_files
from flows.report.study import Study
from flows.report.terminal import print_study
from flows.tracking.store import default_uri
from tests.support.stores import with_store
from tests.support.synthetic import demo_trials, toy_events, write_events

Edit = Callable[[list[Event]], list[Event]]


class ToyRunner:
    """Writes a toy record in place of running a trial, and remembers which it was asked for."""

    parallel = 1

    def __init__(self, edit: dict[str, Edit] | None = None, interrupt: str = "") -> None:
        self.ran: list[str] = []
        self.edit = edit or {}
        self.interrupt = interrupt

    def start(self, trials: Sequence[Trial]) -> None:
        pass

    def run(self, attempts: Iterator[Attempt], view: PlainView, again: Again) -> Iterator[Attempt]:
        for attempt in attempts:
            self.write(attempt)
            yield attempt

    def write(self, attempt: Attempt) -> None:
        trial, folder = attempt.trial, attempt.folder
        self.ran.append(trial.name)
        events = toy_events(trial.labels["recovery"], trial.labels["faults"], trial.seed)
        events = self.edit.get(trial.name, list)(events)
        assert isinstance(events[0], TrialStarted)
        told = {**events[0].settings, "circumstances": dict(attempt.circumstances)}
        events[0] = replace(events[0], settings=told)
        if trial.name == self.interrupt:
            write_events(folder, events[:40])
            raise KeyboardInterrupt
        write_events(folder, events)


@pytest.fixture
def experiment() -> ExperimentConfig:
    # The toy trials have the digests of this experiment, restricted to two strategies here.
    base = demo_trials()[0].config.model_dump(exclude={"seed", "recovery", "faults"})
    kill = next(t for t in demo_trials() if t.labels["faults"] == "kill").config.faults
    axes = {
        "recovery": ["none", "chain"],
        "faults": {"no fault": [], "kill": [fault.model_dump() for fault in kill]},
    }
    return ExperimentConfig.model_validate({**base, "axes": axes, "seeds": [0]})


NAMES = ["none.no-fault.seed-0", "none.kill.seed-0", "chain.no-fault.seed-0", "chain.kill.seed-0"]


# One block, in the order that the seed 0 draws.
ORDER = [NAMES[1], NAMES[2], NAMES[3], NAMES[0]]


def go(
    experiment: ExperimentConfig,
    here: Path,
    run: ToyRunner,
    *,
    store: str | None = None,
    retry_invalid: bool = False,
    resume: bool = True,
) -> tuple[Ran, str]:
    out = io.StringIO()
    view = PlainView(Console(file=out))
    if store is None:
        with_store(here)
    done = run_experiment(
        experiment, here, view, run, store, retry_invalid=retry_invalid, resume=resume
    )
    return done, out.getvalue()


def children(here: Path) -> list[str]:
    client = MlflowClient(tracking_uri=default_uri(here))
    (experiment,) = client.search_experiments(filter_string="name = 'dps/demo'")
    runs = client.search_runs([experiment.experiment_id], "tags.`dps.kind` = 'trial'")
    return sorted(run.data.tags["dps.trial"] for run in runs)


def logged(here: Path, trial: str) -> dict[str, float]:
    """Return the metrics of a trial's run."""
    client = MlflowClient(tracking_uri=default_uri(here))
    (experiment,) = client.search_experiments(filter_string="name = 'dps/demo'")
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`dps.trial` = '{trial}'")
    return dict(run.data.metrics)


@pytest.mark.slow
def test_runs_tracks_and_reports_every_trial_once(
    experiment: ExperimentConfig, tmp_path: Path
) -> None:
    first = ToyRunner()
    done, _ = go(experiment, tmp_path, first)
    assert first.ran == ORDER
    assert [outcome.identity.trial for outcome in done.outcomes] == NAMES
    assert {each.status for each in done.outcomes} == {"valid"}
    assert done.report == tmp_path / "results" / "demo" / "report.html"
    assert done.report.stat().st_size > 10_000
    assert children(tmp_path) == sorted(NAMES)
    # The first to run is a trial with a fault, the last its control.
    effects = {o.identity.trial: o.effects for o in done.outcomes}
    assert effects[NAMES[1]].control == NAMES[0]
    found = effects[NAMES[1]].values["effect_time_mean"]
    assert isinstance(found, float)
    metrics = logged(tmp_path, NAMES[1])
    assert metrics["accuracy/effect"] == pytest.approx(100 * found), "in points"

    second = ToyRunner()
    again, text = go(experiment, tmp_path, second)
    assert second.ran == []
    assert "demo: 4 trials, 0 to run" in text
    assert f"recorded already, skipped: {', '.join(NAMES)}" in text
    assert again.outcomes == done.outcomes
    assert children(tmp_path) == sorted(NAMES)


@pytest.mark.slow
def test_an_interruption_keeps_what_is_whole_and_goes_on(
    experiment: ExperimentConfig, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(experiment, tmp_path, ToyRunner(interrupt=ORDER[2]))
    folder = tmp_path / "results" / "demo"
    left_over = folder / ORDER[2] / "checkpoints"
    left_over.mkdir()
    assert (folder / ORDER[2] / EVENTS_FILE).exists()

    rest = ToyRunner()
    done, _ = go(experiment, tmp_path, rest)
    assert rest.ran == ORDER[2:]
    assert all(outcome.valid for outcome in done.outcomes)
    assert not left_over.exists()
    assert children(tmp_path) == sorted(NAMES)


@pytest.mark.slow
def test_records_of_another_configuration_do_not_mix_with_those_of_a_run_that_is_interrupted(
    experiment: ExperimentConfig, tmp_path: Path
) -> None:
    go(experiment, tmp_path, ToyRunner())
    changed = experiment.model_copy(update={"time_limit": 61.0})
    with pytest.raises(KeyboardInterrupt):
        go(changed, tmp_path, ToyRunner(interrupt=ORDER[1]))
    found = event_files(tmp_path / "results" / "demo")
    assert {path.parent.name for path in found} == set(ORDER[:2])
    kept = tmp_path / "results" / "demo" / EARLIER
    assert len(list(kept.glob(f"*/{EVENTS_FILE}"))) == len(ORDER)


@pytest.mark.slow
def test_failed_trials_run_again_and_invalid_and_resumed_ones_when_asked_for(
    experiment: ExperimentConfig, tmp_path: Path
) -> None:
    def fail(events: list[Event]) -> list[Event]:
        return [*events[:-1], TrialEnded(events[-1].t, "failed", "the store burnt down")]

    def miss(events: list[Event]) -> list[Event]:
        return [*events[:-1], TrialEnded(events[-1].t, "invalid", "no fault came")]

    def late(events: list[Event]) -> list[Event]:
        return [events[0], TrialResumed(events[0].t, "checkpoints", 100), *events[1:]]

    runner = ToyRunner(edit={NAMES[0]: fail, NAMES[1]: miss, NAMES[2]: late})
    done, text = go(experiment, tmp_path, runner)
    assert runner.ran == ORDER, "after a failed trial the others go on"
    assert "failed: the store burnt down" in text
    assert [each.status for each in done.outcomes] == ["failed", "invalid", "valid", "valid"]
    assert [each.whole for each in done.outcomes] == [True, True, False, True]

    retry = ToyRunner()
    done, _ = go(experiment, tmp_path, retry)
    assert retry.ran == NAMES[:1], "only the failed one"
    assert [each.status for each in done.outcomes] == ["valid", "invalid", "valid", "valid"]
    before = f"{NAMES[0]}: 1 attempt before failed or invalid; records are in earlier/"
    assert f"<li>{before}</li>" in done.report.read_text()
    out = io.StringIO()
    print_study(Study(done.outcomes), None, Console(file=out, width=200))
    assert before in out.getvalue()

    retry = ToyRunner()
    done, _ = go(experiment, tmp_path, retry, retry_invalid=True)
    assert retry.ran == NAMES[1:2]
    again = ToyRunner()
    done, _ = go(experiment, tmp_path, again, resume=False)
    assert again.ran == NAMES[2:3]
    assert all(each.whole for each in done.outcomes)
    failed_before = [each.row()["failed_before"] for each in done.outcomes]
    assert failed_before == [1, 1, 0, 0], "nothing went wrong with the resumed one"
    kept = {
        path.parent.name for path in (tmp_path / "results" / "demo" / EARLIER).glob("*/*.jsonl")
    }
    assert sum(name.endswith(".resumed-1") for name in kept) == 1


def test_missing_data_stop_it_first(experiment: ExperimentConfig, tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    folder.mkdir()
    for kind in ("images-idx3", "labels-idx1"):
        for part in ("train", "t10k"):
            (folder / f"{part}-{kind}-ubyte").touch()
    dataset = {"kind": "fashion_mnist", "folder": str(folder)}
    other = ExperimentConfig.model_validate(
        {**experiment.model_dump(exclude_unset=True), "dataset": dataset}
    )
    shutil.rmtree(folder)  # they were there when the configuration was read
    runner = ToyRunner()
    with pytest.raises(ConfigurationError, match="nowhere has no"):
        go(other, tmp_path, runner)
    assert runner.ran == []


@pytest.mark.slow
def test_two_runs_at_once_are_refused(experiment: ExperimentConfig, tmp_path: Path) -> None:
    class Nested(ToyRunner):
        def write(self, attempt: Attempt) -> None:
            go(experiment, tmp_path, ToyRunner())

    with pytest.raises(ConfigurationError, match="another `dps run` is writing"):
        go(experiment, tmp_path, Nested())


@pytest.mark.parametrize(("kind", "at_once"), [("local", 4), ("virtual", 1)])
def test_only_trials_that_share_the_cores_are_recorded_as_run_at_once(
    experiment: ExperimentConfig, tmp_path: Path, kind: str, at_once: int
) -> None:
    """It makes other trials of them: what ran alone is no control of what did not."""
    changed = {**experiment.model_dump(), "cluster": {"kind": kind}}
    trials = expand(ExperimentConfig.model_validate(changed))
    view = PlainView(Console(file=io.StringIO()))
    view.begin("demo", trials, [], None, 4)
    attempts = [*_attempts(trials, (), tmp_path, view, experiment, {}, 4, resume=True)]
    assert {attempt.circumstances["parallel"] for attempt in attempts} == {at_once}
