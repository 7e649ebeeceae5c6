"""`dps run` of a torch module that lies in the working directory, with a server that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flows.records.events import Audited
from flows.records.record import read_record
from tests.flows.execution.test_run import CONFIG
from tests.support.commands import dps
from tests.support.needs_torch import needs_torch

pytestmark = [pytest.mark.cluster, *needs_torch]

WORKLOAD = {"kind": "torch", "module": "mymodels:factory"}
MODULE = """
from torch import nn

def factory(shape):
    return nn.Sequential(nn.Linear(shape.features, 16), nn.Dropout(), nn.Linear(16, shape.classes))
"""


@pytest.mark.slow
def test_a_module_in_the_working_directory_trains_through_a_kill(tmp_path: Path) -> None:
    (tmp_path / "mymodels.py").write_text(MODULE)
    config = {
        **CONFIG,
        "workload": WORKLOAD,
        "dataset": {"kind": "digits", "test_examples": 100},
        "training": {"workers": 1, "updates": 80},
        "recovery": "chain",
        "faults": [{"kind": "kill", "target": "server-0", "at_updates": 20, "back_after": None}],
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    done = dps(tmp_path, "run", "small.yaml")
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "results" / "small" / "seed-0" / "events.jsonl")
    assert record.ended is not None
    assert record.ended.status == "valid"
    assert record.started is not None
    assert "torch" in record.started.versions
    assert [audited.version for audited in record.of(Audited)] == [80]
