"""`dps run` of a torch module that lies in the working directory, with a server that is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dps.events import Audited
from flows.records.record import read_record
from tests.support.needs_torch import needs_torch

pytestmark = [pytest.mark.cluster, *needs_torch]

MODULE = """
from torch import nn

def factory(shape):
    return nn.Sequential(nn.Linear(shape.features, 16), nn.Dropout(), nn.Linear(16, shape.classes))
"""


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(
    ("made", "told"),
    [
        ("nn.Linear(shape.features + 1, shape.classes)", "gradient for x of shape (32, 64)"),
        ("nn.Linear(shape.features, 3)", "and classes up to 9: IndexError"),
        ("'no module'", "made str, expected an nn.Module"),
    ],
    ids=["input", "classes", "no module"],
)
def test_a_module_that_does_not_fit_is_refused_before_anything_runs(
    tmp_path: Path, command: str, made: str, told: str
) -> None:
    (tmp_path / "mymodels.py").write_text(
        f"from torch import nn\n\ndef factory(shape):\n    return {made}\n"
    )
    config = {
        "experiment": "small",
        "workload": {"kind": "torch", "module": "mymodels:factory"},
        "dataset": {"kind": "digits"},
        "training": {"updates": 80},
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    words = [sys.executable, "-m", "flows.cli", command, "small.yaml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_module_in_the_working_directory_trains_through_a_kill(tmp_path: Path) -> None:
    (tmp_path / "mymodels.py").write_text(MODULE)
    config = {
        "experiment": "small",
        "workload": {"kind": "torch", "module": "mymodels:factory"},
        "dataset": {"kind": "digits", "test_examples": 100},
        "training": {"workers": 1, "updates": 80},
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
        "server": {"shards": 1},
        "recovery": "chain",
        "faults": [{"kind": "kill", "target": "server-0", "at_updates": 20, "back_after": None}],
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "flows.cli", "run", "small.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "results" / "small" / "seed-0" / "events.jsonl")
    assert record.ended is not None
    assert record.ended.status == "valid"
    assert record.started is not None
    assert "torch" in record.started.versions
    assert [audited.version for audited in record.of(Audited)] == [80]
