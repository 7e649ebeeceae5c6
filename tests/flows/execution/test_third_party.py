"""One real trial with a kind of another maker in each section, from YAML to the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from dps.events import Disturbed, Killed, Restored, Undisturbed
from flows.metrics.prices import load_prices
from flows.records.record import EVENTS_FILE, read_record
from flows.statistics.finished import read_finished
from flows.tracking.store import default_uri

pytestmark = pytest.mark.cluster

CONFIG = {
    "experiment": "acme",
    "workload": {"kind": "acme_centroids", "sharpness": 2},
    "dataset": {"kind": "acme_clouds", "examples": 300},
    "training": {"workers": 1, "updates": 40, "compute_seconds": 0.02},
    "optimizer": {"kind": "acme_sign", "learning_rate": 0.05},
    "filters": {"*": [{"kind": "acme_alternate", "every": 3}]},
    "server": {"shards": 1},
    "recovery": "checkpoint",
    "faults": [{"kind": "acme_stutter", "target": "server-0", "at_updates": 10, "seconds": 0.3}],
}
RESUMED = (
    "from dps.recovery.manifest import find_saved; import sys;"
    "saved = find_saved(sys.argv[1]); print(saved.run.rule, saved.run.filters)"
)


def run(here: Path, *words: str) -> str:
    command = [sys.executable, *words]
    ended = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_kinds_of_another_maker_run_from_yaml_to_the_report(tmp_path: Path, acme: Path) -> None:
    (tmp_path / "acme.yaml").write_text(yaml.safe_dump(CONFIG))
    run(tmp_path, "-m", "flows.cli", "run", "acme.yaml")
    folder = tmp_path / "results" / "acme" / "seed-0"
    record = read_record(folder / "events.jsonl")

    assert record.started is not None
    assert record.started.versions["acme-dps"] == "1.2.0"
    assert record.started.settings["config"]["faults"][0]["block"] == 0.01
    (disturbed,), (undisturbed,) = record.of(Disturbed), record.of(Undisturbed)
    assert (disturbed.kind, disturbed.node) == ("acme_stutter", "server-0")
    assert disturbed.effective
    assert "blocked" in undisturbed.evidence
    assert record.ended is not None
    assert record.ended.status == "valid"

    shown = run(tmp_path, "-m", "flows.cli", "results", "acme", "--json")
    (row,) = json.loads(shown)["trials"]
    assert row["accuracy_final"] > 0.7
    report = (folder.parent / "report.html").read_text()
    assert "acme_stutter" in report
    assert "acme_sign" in report
    assert "acme-dps" in report

    client = MlflowClient(default_uri(tmp_path))
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    query = "params.`optimizer.kind` = 'acme_sign' AND tags.`dps.kind` = 'trial'"
    (kept,) = client.search_runs(ids, query)
    assert kept.data.params["faults.0.block"] == "0.01"

    # What is beside the checkpoints names classes, of which another process finds the packages.
    told = run(tmp_path, "-c", RESUMED, str(folder / "checkpoints"))
    assert "SignDescent(learning_rate=0.05, decay=0.9)" in told
    assert "Alternate(every=3)" in told


@pytest.mark.slow
def test_a_durability_of_another_maker_brings_a_killed_server_back(
    tmp_path: Path, acme: Path
) -> None:
    shelf = {"kind": "acme_shelf", "folder": str(tmp_path / "shelf")}
    killed = {"kind": "kill", "target": "server-0", "at_updates": 10}
    config = CONFIG | {"recovery": {"durability": shelf}, "faults": [killed]}
    (tmp_path / "acme.yaml").write_text(yaml.safe_dump(config | {"server": {"spares": 1}}))
    run(tmp_path, "-m", "flows.cli", "run", "acme.yaml")
    folder = tmp_path / "results" / "acme" / "seed-0"
    record = read_record(folder / EVENTS_FILE)

    assert record.ended is not None
    assert record.ended.status == "valid"
    (kill,) = record.of(Killed)
    lost = [event for event in record.of(Restored) if event.t > kill.t]
    assert {event.source for event in lost} == {"shelf"}
    # The kill comes when 10 are applied, of which the worker's last one need not be saved yet.
    assert min(event.version for event in lost) >= 9
    assert read_finished(folder / EVENTS_FILE, load_prices()).outcome.row()["updates_lost"] == 0
