"""Tracking, against a real MLflow store: what ends up in it, and that nothing gets in twice."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dps.errors import StoreUnavailable
from dps.events import Evaluated
from flows.config.claims import ClaimSection
from flows.metrics.prices import load_prices
from flows.metrics.score import SCORES
from flows.records.record import read_record
from flows.statistics.comparison import Questions, write_questions
from flows.statistics.finished import Finished, finished, read_experiment
from flows.tracking.store import default_uri
from flows.tracking.tracker import Tracker, deliver, named_figures, tracked_experiments
from tests.support.synthetic import UPDATES, reported, toy_events, write_events, write_experiment

pytestmark = (
    pytest.mark.slow
)  # `make test` tracks trials in tests/flows/execution/test_experiment.py

TRIALS = 16
CLAIM = {
    "claim": "Chains are sooner",
    "metric": "rto_seconds",
    "strategy": "chain",
    "against": "checkpoint",
    "direction": "less",
    "smallest": 0.5,
}


@dataclasses.dataclass(frozen=True)
class Tracked:
    """A working directory whose toy experiment has been tracked, and a client to look with."""

    here: Path
    folder: Path
    client: Any

    def runs(self, kind: str, more: str = "") -> list[Any]:
        experiment = self.client.get_experiment_by_name("dps/demo")
        query = f"tags.`dps.kind` = '{kind}'{more}"
        return list(self.client.search_runs([experiment.experiment_id], query))

    def trial(self, name: str) -> Any:
        [run] = self.runs("trial", f" and tags.`dps.trial` = '{name}'")
        return run

    def strategy(self, strategy: str, condition: str) -> Any:
        same = f" and tags.`dps.strategy` = '{strategy}' and tags.`dps.condition` = '{condition}'"
        [run] = self.runs("strategy", same)
        return run

    def deliver(self) -> int:
        trials = read_experiment(self.folder, load_prices())
        return deliver(self.folder, self.here, None, trials, True, pytest.fail).written


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    here = tmp_path_factory.mktemp("here")
    folder = write_experiment(here / "results" / "demo")
    write_questions(folder, Questions(claims=(ClaimSection.model_validate(CLAIM),)))
    (folder / "report.html").write_text("stands for the report, which takes a minute")
    (folder / "figures").mkdir()
    (folder / "figures" / "one.svg").touch()
    trials = read_experiment(folder, load_prices())
    assert deliver(folder, here, None, trials, True, pytest.fail).written == TRIALS
    from mlflow import MlflowClient

    return Tracked(here, folder, MlflowClient(default_uri(here)))


def one(path: Path) -> Finished:
    return finished(path, read_record(path), load_prices())


def changed(folder: Path, name: str, value: float) -> Finished:
    """A toy trial with another number in its record."""
    events = toy_events("none", "no fault", 1)
    later = reported(events[-2].t, 401, value)
    return one(write_events(folder / name, [*events[:-1], later, events[-1]]))


def test_a_run_for_each_strategy_and_condition_with_its_trials_as_children(
    tracked: Tracked,
) -> None:
    assert [len(tracked.runs(kind)) for kind in ("experiment", "strategy", "trial")] == [1, 8, 16]
    run = tracked.trial("chain.kill.seed-1")
    parent = tracked.strategy("chain", "kill")
    assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert parent.info.run_name == "chain · kill"
    assert {each.info.status for each in tracked.runs("strategy")} == {"FINISHED"}
    assert (run.data.tags["dps.seed"], run.data.tags["dps.status"]) == ("1", "valid")
    ids = tracked_experiments(default_uri(tracked.here))
    assert ids["demo"] == parent.info.experiment_id


def test_means_are_those_of_the_trials(tracked: Tracked) -> None:
    name = "accuracy/final"
    values = [tracked.trial(f"chain.kill.seed-{n}").data.metrics[name] for n in (0, 1)]
    parent = tracked.strategy("chain", "kill")
    assert parent.data.metrics[name] == pytest.approx(sum(values) / 2)
    assert parent.data.tags["dps.trials"] == "2 valid"


def test_strategies_have_the_settings_that_their_trials_share(tracked: Tracked) -> None:
    own = tracked.trial("chain.kill.seed-0").data.params
    shared = {k: v for k, v in own.items() if "seed" not in k and "versions" not in k}
    assert tracked.strategy("chain", "kill").data.params == shared
    assert shared["axis.recovery"] == "chain"


def test_only_shares_are_in_per_cent() -> None:
    for key, unit in {"auc": "points", "rmse": ""}.items():
        assert dict(named_figures(SCORES[key]))[f"{key}/effect"].unit == unit


def test_effects_are_in_points_and_all_other_figures_in_files(tracked: Tracked) -> None:
    trials = {d.outcome.identity.trial: d for d in read_experiment(tracked.folder, load_prices())}
    row = trials["none.kill.seed-0"].outcome.row()
    run = tracked.trial("none.kill.seed-0")
    assert run.data.metrics["accuracy/effect"] == pytest.approx(100 * row["effect_time_mean"])
    quiet = tracked.trial("none.no-fault.seed-0").data.metrics
    assert not {"accuracy/effect", "training/extra_seconds"} & quiet.keys()
    path = tracked.client.download_artifacts(run.info.run_id, "figures.json")
    assert '"cost_usd"' in Path(path).read_text()
    [parent] = tracked.runs("experiment")
    files = {f.path for f in tracked.client.list_artifacts(parent.info.run_id)}
    assert {"report.html", "figures", "results.csv", "questions.json"} <= files
    table = pd.read_csv(tracked.client.download_artifacts(parent.info.run_id, "results.csv"))
    assert len(table) == TRIALS
    assert run.info.artifact_uri.startswith((tracked.here / "mlruns").as_uri())


def test_an_effect_appears_when_the_control_is_recorded(tracked: Tracked, tmp_path: Path) -> None:
    """A trial is written when it is over; its control may run later."""
    folder, name = tmp_path / "results" / "late", "chain.kill.seed-0"
    shutil.copytree(tracked.folder / name, folder / name)

    def effects() -> dict[str, float]:
        trials = read_experiment(folder, load_prices())
        deliver(folder, tracked.here, None, trials, True, pytest.fail)
        experiment = tracked.client.get_experiment_by_name("dps/late")
        query = f"tags.`dps.trial` = '{name}'"
        [run] = tracked.client.search_runs([experiment.experiment_id], query)
        return {k: v for k, v in run.data.metrics.items() if "effect" in k}

    assert effects() == {}
    shutil.copytree(tracked.folder / "chain.no-fault.seed-0", folder / "chain.no-fault.seed-0")
    assert effects()


def test_curves_are_over_the_versions_of_the_weights(tracked: Tracked) -> None:
    run = tracked.trial("stateless.kill.seed-0").info.run_id
    assert len(tracked.client.get_metric_history(run, "train/loss")) == UPDATES
    record = read_record(tracked.folder / "stateless.kill.seed-0" / "events.jsonl")
    history = tracked.client.get_metric_history(run, "eval/accuracy")
    scores = record.of(Evaluated)
    assert [(m.value, m.step) for m in history] == [
        (100 * s.accuracy, round(s.updates)) for s in scores
    ]


def test_descriptions_have_strategies_and_verdicts(tracked: Tracked) -> None:
    experiment = tracked.client.get_experiment_by_name("dps/demo")
    [parent] = tracked.runs("experiment")
    note = experiment.tags["mlflow.note.content"]
    assert note == parent.data.tags["mlflow.note.content"]
    assert note.startswith(
        "**Strategies:** chain, checkpoint, none, stateless; **Conditions:** no fault, kill; "
        "**Seeds:** 0, 1\n"
    ), "the line that is shown before the rest is unfolded"
    assert "- *Chains are sooner*: **" in note
    assert parent.data.tags["dps.claim.1"].endswith(": Chains are sooner")


def test_tracking_again_changes_nothing_and_keeps_a_user_s_description(tracked: Tracked) -> None:
    experiment = tracked.client.get_experiment_by_name("dps/demo")
    note = "mlflow.note.content"
    tracked.client.set_experiment_tag(experiment.experiment_id, note, "Mine.")
    before = {r.info.run_id: r.data.metrics for r in tracked.runs("trial")}
    assert tracked.deliver() == 0
    assert {r.info.run_id: r.data.metrics for r in tracked.runs("trial")} == before
    run = tracked.strategy("chain", "kill")
    name = next(iter(run.data.metrics))
    assert len(tracked.client.get_metric_history(run.info.run_id, name)) == 1
    assert tracked.client.get_experiment(experiment.experiment_id).tags[note] == "Mine."


def test_runs_are_replaced_by_later_records_and_kept_of_other_configurations(
    tracked: Tracked, tmp_path: Path
) -> None:
    def written(done: Finished, folder: Path = tracked.here) -> str:
        return Tracker("again", folder, default_uri(tracked.here)).track_trial(done)

    def state(run: str) -> tuple[str, str]:
        found = tracked.client.get_run(run)
        return found.info.lifecycle_stage, found.data.tags["dps.kind"]

    first = written(changed(tmp_path, "a", 0.1))
    assert written(changed(tmp_path, "a", 0.1)) == first
    second = written(changed(tmp_path, "b", 0.2))
    assert (state(first)[0], state(second)) == ("deleted", ("active", "trial"))
    tracked.client.delete_tag(second, "dps.record")  # as one that was left half written
    third = written(changed(tmp_path, "b", 0.2))
    assert (state(second)[0], state(third)) == ("deleted", ("active", "trial"))
    theirs = written(changed(tmp_path, "c", 0.3), tmp_path)
    assert state(third) == state(theirs) == ("active", "trial"), "of other directories"
    done = changed(tmp_path, "d", 0.4)
    other = dataclasses.replace(done.outcome.identity, digest="another")
    outcome = dataclasses.replace(done.outcome, identity=other)
    fourth = written(dataclasses.replace(done, outcome=outcome))
    assert (state(third), state(fourth)[1]) == (("active", "earlier"), "trial")


# -- stores that cannot be used ----------------------------------------------------------------


def test_stores_that_cannot_be_used_are_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "mlruns").write_text("in the way")
    with pytest.raises(StoreUnavailable, match=r"cannot be used: .*MLFLOW_TRACKING_URI"):
        Tracker("demo", tmp_path)
    (here := tmp_path / "damaged" / "mlruns").mkdir(parents=True)
    (here / "mlflow.db").write_text("no database at all, but long enough " * 50)
    with pytest.raises(StoreUnavailable, match=r"file is not a database\. .*move it away"):
        Tracker("demo", here.parent)
    for uri in ("http://127.0.0.1:9", "pigeon://loft"):
        with pytest.raises(StoreUnavailable, match=uri):
            Tracker("demo", tmp_path / "other", uri)


def test_mlflow_neither_talks_nor_reports_home(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from flows.tracking.tracker import Tracker\n"
        "Tracker('quiet', Path.cwd())\n"
        "from mlflow.telemetry.utils import is_telemetry_disabled\n"
        "assert is_telemetry_disabled()\n"
    )
    markers = ("CI", "PYTEST_CURRENT_TEST", "MLFLOW_DISABLE_TELEMETRY", "MLFLOW_TRACKING_URI")
    environment = {k: v for k, v in os.environ.items() if k not in markers}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "mlruns" / "mlflow.db").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"mlruns"}
