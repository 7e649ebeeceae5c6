"""Tracking, against a real MLflow store: what ends up in it, and that nothing gets in twice."""

from __future__ import annotations

import csv
import dataclasses
import os
import re
import shutil
import socketserver
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dps.errors import StoreUnavailable
from dps.events import Connected, Evaluated, TrialStarted
from flows.analysis.comparison import compared, write_comparison
from flows.analysis.outcome import outcome
from flows.analysis.prices import load_prices
from flows.analysis.statistics.claims import judge, write_claims
from flows.config.base import ComparisonSection
from flows.config.claims import ClaimSection
from flows.config.trials import flat
from flows.metrics import BY_KEY
from flows.records.record import Record, read_record, write_configuration
from flows.report.html import write_report
from flows.tracking.names import COMPARED
from flows.tracking.notes import experiment_note
from flows.tracking.store import default_uri
from flows.tracking.tracker import Tracker, tracked_experiments
from tests.support.synthetic import (
    UPDATES,
    missed,
    read_trials,
    reported,
    toy_events,
    write_events,
    write_experiment,
)

pytestmark = (
    pytest.mark.slow
)  # `make test` tracks trials in tests/flows/execution/test_experiment.py

HOUR = 3600.0
MLFLOW_AT_ONCE = 1000  # metrics
TRIALS = 16


class LosesAnswers:
    """A server that carries out what it is asked for, and whose answers are lost on the way.

    `asked` has the first line of each request. Use as a context manager.
    """

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        asked = self.asked

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                if line := self.rfile.readline():
                    asked.append(line)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> LosesAnswers:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclasses.dataclass(frozen=True)
class Tracked:
    """A working directory whose toy experiment has been tracked, and a client to look with."""

    here: Path
    folder: Path
    tracker: Tracker
    client: Any

    def runs(self, query: str = "") -> list[Any]:
        experiment = self.client.get_experiment_by_name("dps/demo")
        return list(self.client.search_runs([experiment.experiment_id], query))

    def children(self) -> list[Any]:
        return self.runs(f"tags.`mlflow.parentRunId` = '{self.tracker.parent_id}'")

    def child(self, name: str) -> Any:
        [run] = self.runs(f"tags.`dps.trial` = '{name}'")
        return run


def track_all(tracker: Tracker, folder: Path) -> None:
    trials = read_trials(folder, load_prices())
    for record, result in trials:
        events_file = folder / result.identity.trial / "events.jsonl"
        tracker.track_trial(record, result, events_file, "0123456789abcdef")
    figures = folder / "figures"
    report = write_report(folder, folder / "report.html", figures=figures)
    tracker.track_experiment(trials, report, figures)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    here = tmp_path_factory.mktemp("here")
    folder = write_experiment(here / "results" / "demo")
    tracker = Tracker("demo", here)
    track_all(tracker, folder)
    from mlflow import MlflowClient

    return Tracked(here, folder, tracker, MlflowClient(default_uri(here)))


def test_one_parent_and_a_child_for_every_trial(tracked: Tracked) -> None:
    assert len(tracked.runs()) == 1 + TRIALS
    assert len(tracked.children()) == TRIALS
    assert {run.info.status for run in tracked.runs()} == {"FINISHED"}


def test_the_experiments_of_a_store_are_known_by_name(tracked: Tracked) -> None:
    experiment = tracked.client.get_experiment_by_name("dps/demo")
    assert tracked_experiments(default_uri(tracked.here))["demo"] == experiment.experiment_id


def test_tracking_again_changes_nothing(tracked: Tracked) -> None:
    before = {run.info.run_id for run in tracked.runs()}
    again = Tracker("demo", tracked.here)
    track_all(again, tracked.folder)
    assert again.parent_id == tracked.tracker.parent_id
    assert {run.info.run_id for run in tracked.runs()} == before


def test_a_trial_that_ran_again_replaces_its_child(tracked: Tracked, tmp_path: Path) -> None:
    old = tracked.child("none.no-fault.seed-1")
    events = toy_events("none", "no fault", 1)
    later = reported(events[-2].t, 401, 0.123)
    path = write_events(tmp_path, [*events[:-1], later, events[-1]])
    record = read_record(path)
    tracked.tracker.track_trial(record, outcome(record, load_prices()), path)
    new = tracked.child("none.no-fault.seed-1")
    assert new.info.run_id != old.info.run_id
    assert len(tracked.children()) == TRIALS


def test_runs_of_another_directory_are_left_alone(tracked: Tracked, tmp_path: Path) -> None:
    before = {run.info.run_id for run in tracked.runs()}
    events = toy_events("none", "no fault", 1)
    later = reported(events[-2].t, 401, 0.321)
    record = read_record(path := write_events(tmp_path, [*events[:-1], later, events[-1]]))
    theirs = Tracker("demo", tmp_path, default_uri(tracked.here))
    entered = theirs.track_trial(record, outcome(record, load_prices()), path)
    assert {run.info.run_id for run in tracked.runs()} == before | {theirs.parent_id, entered}
    again = Tracker("demo", tmp_path, default_uri(tracked.here))
    assert again.parent_id == theirs.parent_id
    assert again.track_trial(record, outcome(record, load_prices()), path) == entered
    for run_id in (entered, theirs.parent_id):
        tracked.client.delete_run(run_id)


def test_requests_are_not_repeated_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    with pytest.raises(StoreUnavailable), LosesAnswers() as server:
        Tracker("demo", tmp_path, server.uri)
    assert len(server.asked) == 1


def test_tags_say_which_trial_it_is(tracked: Tracked) -> None:
    run = tracked.child("chain.kill.seed-1")
    tags = run.data.tags
    assert run.info.run_name == "chain.kill.seed-1"
    assert tags["mlflow.parentRunId"] == tracked.tracker.parent_id
    assert (tags["dps.strategy"], tags["dps.condition"], tags["dps.seed"]) == ("chain", "kill", "1")
    assert (tags["dps.status"], tags["dps.label.recovery"]) == ("valid", "chain")
    assert len(tags["dps.digest"]) == 12


def test_parent_and_children_carry_the_digest_of_their_experiment(tracked: Tracked) -> None:
    [parent] = tracked.runs("tags.`dps.kind` = 'experiment'")
    digest = parent.data.tags["dps.experiment.digest"]
    assert len(digest) == 12
    assert tracked.child("chain.kill.seed-1").data.tags["dps.experiment.digest"] == digest


def test_descriptions_say_what_is_asked_and_what_happened(tracked: Tracked) -> None:
    experiment = tracked.client.get_experiment_by_name("dps/demo")
    [parent] = tracked.runs("tags.`dps.kind` = 'experiment'")
    note = experiment.tags["mlflow.note.content"]
    assert note == parent.data.tags["mlflow.note.content"]
    assert note.startswith(
        "**Strategies:** none, checkpoint, chain, stateless; **Conditions:** no fault, kill; "
        "**Seeds:** 0, 1\n"
    ), "the line that is shown before the rest is unfolded"
    assert "No claims were fixed beforehand" in note
    told = tracked.child("chain.kill.seed-1").data.tags["mlflow.note.content"]
    assert re.fullmatch(
        r"chain, kill, seed 1: server-0 was killed with SIGKILL at \d.\d\d s: a replica took over "
        r".*later; final accuracy \d\d\.\d%; training \d.\d\d s\.",
        told,
    )
    told = tracked.child("none.no-fault.seed-0").data.tags["mlflow.note.content"]
    assert told.startswith("none, no fault, seed 0: nothing failed; final accuracy")


def test_claims_and_their_verdicts_are_in_the_description(tracked: Tracked) -> None:
    claim = {"metric": "rto_seconds", "strategy": "chain", "against": "checkpoint"}
    section = ClaimSection.model_validate(
        {"claim": "Chains are sooner", **claim, "direction": "less", "smallest": 0.5}
    )
    results = [result for _, result in read_trials(tracked.folder, load_prices())]
    note = experiment_note(results, judge(results, [section], np.random.default_rng(0)))
    assert re.search(r"- \*Chains are sooner\*: \*\*(holds|not resolved)\*\*\. .*chain", note)


def test_verdicts_are_tags_of_the_run_of_an_experiment(tracked: Tracked, tmp_path: Path) -> None:
    folder = shutil.copytree(tracked.folder, tmp_path / "claimed")
    claim = {"metric": "rto_seconds", "strategy": "chain", "against": "checkpoint"}
    told = {"claim": "Chains are sooner", "direction": "less", "smallest": 0.5}
    write_claims(folder, [ClaimSection.model_validate({**claim, **told})])
    tracker = Tracker("claimed", tracked.here)
    trials = read_trials(folder, load_prices())
    tracker.track_experiment(trials, folder / "report.html", tracked.folder / "figures")
    tags = tracked.client.get_run(tracker.parent_id).data.tags
    claims = {name: value for name, value in tags.items() if name.startswith("dps.claim")}
    assert list(claims) == ["dps.claim.1"]
    assert re.fullmatch(r"[a-z ]+: Chains are sooner", claims["dps.claim.1"])


def test_trials_of_an_earlier_configuration_can_be_told(tracked: Tracked) -> None:
    """They stay in the experiment of the same name, without the digest of what it is now."""
    tracker = Tracker("narrowed", tracked.here)
    trials = [
        trial
        for trial in read_trials(tracked.folder, load_prices())
        if trial[1].identity.trial in ("none.no-fault.seed-0", "chain.no-fault.seed-0")
    ]
    runs = {
        result.identity.strategy: tracker.track_trial(
            record, result, tracked.folder / result.identity.trial / "events.jsonl"
        )
        for record, result in trials
    }
    known = []
    for some in (trials, [each for each in trials if each[1].identity.strategy == "chain"]):
        tracker.track_experiment(some, tracked.folder / "report.html", tracked.folder / "figures")
        of_all = (tracker.parent_id, runs["none"], runs["chain"])
        tags = [tracked.client.get_run(run_id).data.tags for run_id in of_all]
        known.append([each["dps.experiment.digest"] for each in tags])
    (first, *both), (second, earlier, kept) = known
    assert both == [first, first]
    assert first != second
    assert (earlier, kept) == (first, second)


def test_an_experiment_without_a_valid_trial_is_a_failed_run(
    tracked: Tracked, tmp_path: Path
) -> None:
    record = read_record(write_events(tmp_path, missed(toy_events("chain", "no fault"))))
    tracker = Tracker("missed", tracked.here)
    assert tracked.client.get_run(tracker.parent_id).info.status == "RUNNING"
    trials = [(record, outcome(record, load_prices()))]
    tracker.track_experiment(trials, tracked.folder / "report.html", tracked.folder / "figures")
    assert tracked.client.get_run(tracker.parent_id).info.status == "FAILED"


def test_the_run_of_an_experiment_has_its_configuration(tracked: Tracked, tmp_path: Path) -> None:
    def artifact(tracker: Tracker, name: str) -> str:
        return Path(tracked.client.download_artifacts(tracker.parent_id, name)).read_text()

    resolved = yaml.safe_load(artifact(tracked.tracker, "configuration/resolved.yaml"))
    assert resolved["experiment"] == "demo"
    assert list(resolved["axes"]["recovery"]) == ["none", "checkpoint", "chain", "stateless"]
    folder = shutil.copytree(tracked.folder, tmp_path / "written")
    write_configuration(folder, "# why\nexperiment: demo\n")
    write_comparison(folder, ComparisonSection(baseline="chain"))
    tracker = Tracker("written", tracked.here)
    trials = read_trials(folder, load_prices())
    tracker.track_experiment(trials, folder / "report.html", tracked.folder / "figures")
    assert artifact(tracker, "configuration/as_written.yaml") == "# why\nexperiment: demo\n"
    resolved = yaml.safe_load(artifact(tracker, "configuration/resolved.yaml"))
    assert resolved["comparison"] == {"baseline": "chain"}
    write_configuration(folder, "")
    tracker.track_experiment(trials, folder / "report.html", tracked.folder / "figures")
    left = artifact(tracker, "configuration/as_written.yaml")
    assert left.startswith("# Of the last run")
    assert yaml.safe_load(left) is None
    names = [each.path for each in tracked.client.list_artifacts(tracker.parent_id)]
    assert sorted(names) == ["comparison.csv", "configuration", "figures", "report.html"]


def test_the_run_of_an_experiment_shows_the_comparison(tracked: Tracked) -> None:
    [parent] = tracked.runs("tags.`dps.kind` = 'experiment'")
    path = tracked.client.download_artifacts(parent.info.run_id, "comparison.csv")
    rows = list(csv.DictReader(Path(path).read_text().splitlines()))
    assert {row["strategy"] for row in rows} == {"none", "checkpoint", "chain", "stateless"}
    [lost] = [
        row
        for row in rows
        if (row["condition"], row["strategy"], row["metric"]) == ("kill", "none", "updates_lost")
    ]
    note = parent.data.tags["mlflow.note.content"]
    lines = note.partition("**kill**")[2].strip().splitlines()
    heading, _, first, *_ = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[:5]]
    assert heading[:2] == ["strategy", "seeds"]
    assert first[:2] == ["none", lost["n"]]
    assert first[heading.index("updates lost")] == f"{float(lost['mean']):,.1f}".removesuffix(".0")


def test_a_description_has_the_tables_that_fit(tracked: Tracked) -> None:
    results = [result for _, result in read_trials(tracked.folder, load_prices())]
    rows = compared(results, ComparisonSection(), np.random.default_rng(0))
    whole = experiment_note(results, (), rows)
    assert whole.count("| strategy |") == 2
    assert "comparison.csv" not in whole
    cut = experiment_note(results, (), rows, len(whole) - 1)
    assert cut.count("| strategy |") == 1
    assert "The other conditions are in `comparison.csv`" in cut
    assert len(cut) < len(whole)
    assert cut.endswith(whole[-100:]), "what comes after the tables is there"


def test_a_description_that_somebody_wrote_stays(tracked: Tracked, tmp_path: Path) -> None:
    shutil.copytree(tracked.folder, folder := tmp_path / "noted")
    shutil.rmtree(folder / "figures")
    tracker = Tracker("noted", tracked.here)
    report, figures = folder / "report.html", tracked.folder / "figures"
    trials = read_trials(folder, load_prices())
    tracker.track_experiment(trials, report, figures)
    number = tracked.client.get_experiment_by_name("dps/noted").experiment_id
    few = [trial for trial in trials if trial[1].identity.strategy == "chain"]
    tracker.track_experiment(few, report, figures)
    note = tracked.client.get_experiment(number).tags["mlflow.note.content"]
    assert "**Strategies:** chain; " in note, "ours is kept up to date"
    tracked.client.set_experiment_tag(number, "mlflow.note.content", "for the paper")
    tracker.track_experiment(trials, report, figures)
    assert tracked.client.get_experiment(number).tags["mlflow.note.content"] == "for the paper"
    run = tracked.client.get_run(tracker.parent_id)
    assert run.data.tags["mlflow.note.content"].startswith("**Strategies:** none, ")
    tracked.client.set_tag(tracker.parent_id, "mlflow.note.content", "for the appendix")
    tracker.track_experiment(few, report, figures)
    tags = tracked.client.get_run(tracker.parent_id).data.tags
    assert tags["mlflow.note.content"] == "for the appendix"


@pytest.mark.parametrize("score", ["auc", "r2", "rmse", "loss"])
def test_figures_have_the_name_of_the_score(tracked: Tracked, tmp_path: Path, score: str) -> None:
    started, *rest = toy_events("chain", "kill")
    assert isinstance(started, TrialStarted)
    evaluation = {**started.settings["config"].get("evaluation", {}), "metric": score}
    config = {**started.settings["config"], "evaluation": evaluation}
    settings = {**started.settings, "config": config, "digest": f"of-{score}"}
    path = write_events(tmp_path, [dataclasses.replace(started, settings=settings), *rest])
    record = read_record(path)
    tracker = Tracker("scored", tracked.here)
    run = tracked.client.get_run(tracker.track_trial(record, outcome(record, load_prices()), path))
    assert f"compare/{score}_final" in run.data.metrics
    assert "compare/accuracy_final" not in run.data.metrics


def test_metrics_to_compare_by_come_first_and_the_rest_last(tracked: Tracked) -> None:
    """As MLflow sorts the sections of its charts."""
    metrics = tracked.child("chain.kill.seed-0").data.metrics
    sections = sorted({name.split("/")[0] for name in metrics if not name.startswith("system/")})
    assert sections == ["compare", "eval", "server", "staleness", "train", "trial"]
    compared = [name for name in metrics if name.startswith("compare/")]
    assert 15 <= len(compared) <= 22
    assert metrics["compare/cost_micro_usd"] == pytest.approx(1e6 * metrics["trial/cost/usd"])
    assert all(key in BY_KEY for key in COMPARED)


def test_the_strategies_of_a_seed_stand_beside_each_other(tracked: Tracked) -> None:
    experiment = tracked.client.get_experiment_by_name("dps/demo")
    found = tracked.client.search_runs(
        [experiment.experiment_id], "tags.dps.kind = 'trial'", order_by=["tags.`dps.order` ASC"]
    )
    assert [run.info.run_name for run in found][:5] == [
        *(f"{s}.kill.seed-0" for s in ("chain", "checkpoint", "none", "stateless")),
        "chain.no-fault.seed-0",
    ]


def test_params_are_flat_and_dotted(tracked: Tracked) -> None:
    params = tracked.child("chain.kill.seed-0").data.params
    assert params["recovery.durability.kind"] == "chain"
    assert params["training.updates"] == str(UPDATES)
    assert params["faults.0.target"] == "server-0"
    assert params["workload.hidden"] == "[32]"
    assert params["versions.dps"] == "0.1.0"
    assert (params["axis.recovery"], params["axis.faults"]) == ("chain", "kill")
    assert sorted(params)[:3] == ["axis.faults", "axis.recovery", "axis.seed"]


def test_series_are_whole_and_start_with_the_training(tracked: Tracked) -> None:
    run = tracked.child("stateless.kill.seed-0")
    losses = tracked.client.get_metric_history(run.info.run_id, "train/loss")
    assert len(losses) == UPDATES
    record = read_record(tracked.folder / "stateless.kill.seed-0" / "events.jsonl")
    scores = record.of(Evaluated)
    history = tracked.client.get_metric_history(run.info.run_id, "eval/accuracy")
    assert [m.value for m in history] == [s.accuracy for s in scores]
    assert [m.timestamp for m in history] == [round(1000 * s.t) for s in scores]
    steps = [m.step for m in history]
    assert steps == sorted(steps)
    assert steps[0] < 10
    assert steps[-1] == UPDATES  # the gradients pushed, so that runs of any speed align
    for name in ("staleness/p99", "staleness/seconds_p99", "server/updates", "eval/loss"):
        assert len(tracked.client.get_metric_history(run.info.run_id, name)) > 5


def test_final_scalars_stand_beside_the_series(tracked: Tracked) -> None:
    metrics = tracked.child("none.kill.seed-0").data.metrics
    row = outcome(
        read_record(tracked.folder / "none.kill.seed-0" / "events.jsonl"), load_prices()
    ).row()
    assert metrics["compare/accuracy_final"] == row["accuracy_final"]
    assert metrics["compare/rto_seconds"] == row["rto_seconds"]
    assert metrics["compare/updates_lost"] == row["updates_lost"]
    assert metrics["trial/cost/usd"] == row["cost_usd"]
    assert metrics["system/server/system_memory_usage_megabytes"] > 100
    assert metrics["trial/non_finite_values_dropped"] == 0
    assert "compare/rto_seconds" not in tracked.child("none.no-fault.seed-0").data.metrics


def test_the_effect_of_a_fault_is_in_the_run_of_the_trial_that_had_it(tracked: Tracked) -> None:
    results = {o.identity.trial: o for _, o in read_trials(tracked.folder, load_prices())}
    run, row = tracked.child("none.kill.seed-0"), results["none.kill.seed-0"].row()
    assert run.data.metrics["compare/effect_time_mean"] == pytest.approx(row["effect_time_mean"])
    assert run.data.metrics["trial/effect/money_end"] == pytest.approx(row["effect_money_end"])
    assert run.data.metrics["compare/gradients_deficit"] == row["gradients_deficit"]
    assert run.data.tags["dps.control"] == "none.no-fault.seed-0"
    quiet = tracked.child("none.no-fault.seed-0")
    assert not any("effect" in name for name in quiet.data.metrics)


def test_an_effect_appears_when_the_control_is_recorded_and_once(
    tracked: Tracked, tmp_path: Path
) -> None:
    """A trial is entered when it is over; its control may run later."""
    folder, name = tmp_path / "late", "chain.kill.seed-0"
    shutil.copytree(tracked.folder / name, folder / name)
    tracker = Tracker("late", tracked.here)
    [(record, alone)] = read_trials(folder, load_prices())
    run_id = tracker.track_trial(record, alone, folder / name / "events.jsonl")
    assert "compare/effect_time_mean" not in tracked.client.get_run(run_id).data.metrics
    shutil.copytree(tracked.folder / "chain.no-fault.seed-0", folder / "chain.no-fault.seed-0")
    report = write_report(folder, folder / "report.html", figures=folder / "figures")
    trials = read_trials(folder, load_prices())
    [expected] = [o.row()["effect_time_mean"] for _, o in trials if o.effects.control]
    for _ in range(2):
        tracker.track_experiment(trials, report, folder / "figures")
    history = tracked.client.get_metric_history(run_id, "compare/effect_time_mean")
    assert [point.value for point in history] == [pytest.approx(expected)]


def test_the_data_set_is_an_input(tracked: Tracked) -> None:
    [entry] = tracked.child("none.kill.seed-0").inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest) == ("digits", "0123456789ab")


def test_artifacts_lie_in_the_working_directory(tracked: Tracked) -> None:
    run = tracked.child("none.kill.seed-0")
    names = {file.path for file in tracked.client.list_artifacts(run.info.run_id)}
    assert names == {"events.jsonl", "trial.png"}
    assert run.info.artifact_uri.startswith((tracked.here / "mlruns").as_uri())
    parent = tracked.tracker.parent_id
    of_all = {"comparison.csv", "configuration", "figures", "report.html"}
    assert {f.path for f in tracked.client.list_artifacts(parent)} == of_all
    figures = {file.path for file in tracked.client.list_artifacts(parent, "figures")}
    for name in ("accuracy-time-kill", "recovery-time", "timeline-kill-chain"):
        assert {f"figures/{name}.{ending}" for ending in ("svg", "png", "csv")} <= figures


def test_an_invalid_trial_is_a_failed_run(tracked: Tracked, tmp_path: Path) -> None:
    path = write_events(tmp_path, missed(toy_events("chain", "no fault")))
    record = read_record(path)
    tracker = Tracker("other", tracked.here)
    run_id = tracker.track_trial(record, outcome(record, load_prices()), path)
    run = tracked.client.get_run(run_id)
    assert run.info.status == "FAILED"
    assert run.data.tags["dps.reason"] == "the training ended first"


def test_a_trial_on_virtual_time_says_so_and_nothing_of_connections(
    tracked: Tracked, tmp_path: Path
) -> None:
    started, *rest = toy_events("none", "no fault")
    cluster = {"kind": "virtual", "profile": "laptop"}
    settings = {**started.settings, "digest": "virtual", "config": {"cluster": cluster}}  # type: ignore[attr-defined]
    begun = dataclasses.replace(started, settings=settings)  # type: ignore[call-arg]
    connected = Connected(started.t, "worker-0", "server-0", "dask", "as chosen")
    path = write_events(tmp_path, [begun, connected, *rest])
    record = read_record(path)
    tracker = Tracker("virtual", tracked.here)
    run_id = tracker.track_trial(record, outcome(record, load_prices()), path)
    run = tracked.client.get_run(run_id)
    assert run.data.tags["dps.virtual"] == "laptop"
    assert "dps.transport" not in run.data.tags


def test_a_trial_on_virtual_time_is_shown_as_of_when_it_was_recorded(
    tracked: Tracked, tmp_path: Path
) -> None:
    started, *rest = toy_events("none", "no fault")
    settings = {
        **started.settings,  # type: ignore[attr-defined]
        "digest": "of-2001",
        "config": {"cluster": {"kind": "virtual", "profile": "laptop"}},
    }
    begun = dataclasses.replace(started, settings=settings)  # type: ignore[call-arg]
    path = write_events(tmp_path, [begun, *rest])
    recorded = 1_790_123_456.0
    os.utime(path, (recorded, recorded))
    record = read_record(path)
    run_id = Tracker("of-2001", tracked.here).track_trial(
        record, outcome(record, load_prices()), path
    )
    run = tracked.client.get_run(run_id)
    lasted = record.events[-1].t - record.events[0].t
    assert run.info.end_time == 1000 * recorded
    assert run.info.end_time - run.info.start_time == pytest.approx(1000 * lasted, abs=2)
    history = tracked.client.get_metric_history
    points = [point for name in run.data.metrics for point in history(run_id, name)]
    assert points
    assert all(abs(point.timestamp - 1000 * recorded) < 1000 * HOUR for point in points)


def test_values_that_are_not_finite_are_dropped_and_counted(
    tracked: Tracked, tmp_path: Path
) -> None:
    events = toy_events("chain", "no fault")
    odd = [
        reported(events[-2].t, step, value)
        for step, value in enumerate([float("nan"), float("inf"), 0.5])
    ]
    path = write_events(tmp_path, [*events[:-1], *odd, events[-1]])
    record = read_record(path)
    tracker = Tracker("odd", tracked.here)
    run_id = tracker.track_trial(record, outcome(record, load_prices()), path)
    metrics = tracked.client.get_run(run_id).data.metrics
    assert metrics["trial/non_finite_values_dropped"] == 2
    assert len(tracked.client.get_metric_history(run_id, "train/loss")) == UPDATES + 1


def test_long_series_and_long_settings_fit(tracked: Tracked, tmp_path: Path) -> None:
    started, *rest = toy_events("none", "no fault")
    settings = {**started.settings, "digest": "long", "config": {"note": "x" * 20_000}}  # type: ignore[attr-defined]
    many = [reported(rest[0].t + i / 1000, i, 1.0) for i in range(3 * MLFLOW_AT_ONCE)]
    events = [dataclasses.replace(started, settings=settings), *many, *rest]  # type: ignore[call-arg]
    path = write_events(tmp_path, events)
    record = read_record(path)
    tracker = Tracker("long", tracked.here)
    run_id = tracker.track_trial(record, outcome(record, load_prices()), path)
    run = tracked.client.get_run(run_id)
    assert run.data.params["note"].endswith("x…")
    assert len(tracked.client.get_metric_history(run_id, "train/loss")) > 3 * MLFLOW_AT_ONCE


def test_an_experiment_deleted_in_the_interface_comes_back(tracked: Tracked) -> None:
    Tracker("deleted", tracked.here)
    experiment = tracked.client.get_experiment_by_name("dps/deleted")
    tracked.client.delete_experiment(experiment.experiment_id)
    Tracker("deleted", tracked.here)
    assert tracked.client.get_experiment_by_name("dps/deleted").lifecycle_stage == "active"


# -- stores that cannot be used ----------------------------------------------------------------


def test_a_file_in_the_way_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "mlruns").write_text("in the way")
    with pytest.raises(StoreUnavailable, match=r"cannot be used: .*MLFLOW_TRACKING_URI"):
        Tracker("demo", tmp_path)


def test_a_store_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "mlruns").mkdir()
    (tmp_path / "mlruns" / "mlflow.db").write_text("no database at all, but long enough " * 50)
    with pytest.raises(StoreUnavailable, match=r"file is not a database\. Move the file away"):
        Tracker("demo", tmp_path)


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:9"):
        Tracker("demo", tmp_path, "http://127.0.0.1:9")


def test_a_store_of_an_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="pigeon://"):
        Tracker("demo", tmp_path, "pigeon://loft")


# -- manners -----------------------------------------------------------------------------------


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


def test_flat_settings() -> None:
    nested = {"a": {"b": 1, "c": {}}, "d": [{"e": 2}], "f": [1, 2], "g": None}
    assert flat(nested) == {"a.b": 1, "a.c": {}, "d.0.e": 2, "f": [1, 2], "g": None}


def test_a_record_without_a_start_can_be_tracked(tracked: Tracked, tmp_path: Path) -> None:
    path = write_events(tmp_path, toy_events()[-3:])
    record = Record(read_record(path).events)
    Tracker("nameless", tracked.here).track_trial(record, outcome(record, load_prices()), path)


def test_settings_whose_names_mlflow_does_not_take_are_tracked(
    tracked: Tracked, tmp_path: Path
) -> None:
    started, *others = toy_events()
    assert isinstance(started, TrialStarted)
    config = {**started.settings["config"], "filters": {"*": [{"kind": "lossless"}]}}
    settings = {**started.settings, "config": config}
    path = write_events(tmp_path, [dataclasses.replace(started, settings=settings), *others])
    record = read_record(path)
    tracker = Tracker("filtered", tracked.here)
    tracker.track_trial(record, outcome(record, load_prices()), path)
    [run] = [
        run
        for experiment in tracked.client.search_experiments(filter_string="name = 'dps/filtered'")
        for run in tracked.client.search_runs([experiment.experiment_id])
        if "filters._.0.kind" in run.data.params
    ]
    assert run.data.params["filters._.0.kind"] == "lossless"


def test_the_parent_counts_trials_by_status(tracked: Tracked) -> None:
    metrics = tracked.client.get_run(tracked.tracker.parent_id).data.metrics
    assert metrics["trials/valid"] == TRIALS
