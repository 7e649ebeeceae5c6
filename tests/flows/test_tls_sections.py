"""What a configuration says of TLS, and a whole trial over it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.cluster.tls import temporary
from dps.errors import ConfigurationError
from flows.config import load_experiment
from flows.grid import expand
from flows.kept import settings, trial_from
from flows.record import EVENTS_FILE, read_record
from flows.tls_sections import security_of
from tests.cluster.tls import files_of, ports_below, said_plainly
from tests.support import eventually

SMALL: dict[str, Any] = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"workers": 1, "updates": 100},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "server": {"shards": 1},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


def digest(config: Path, *overrides: str) -> str:
    (trial,) = expand(load_experiment(str(config), overrides))
    return trial.digest


def test_without_tls_a_trial_is_the_one_that_it_always_was(config: Path) -> None:
    before = digest(config)
    assert (
        digest(config, "cluster={kind: local, tls: off}")
        == digest(config, "cluster={kind: local}")
        == before
    )
    assert digest(config, "cluster={kind: local, tls: temporary}") != before


def test_tls_alone_is_that_of_this_machine(config: Path) -> None:
    whole = digest(config, "cluster={kind: local, tls: temporary}")
    assert digest(config, "cluster.tls=temporary") == whole


def test_a_trial_is_the_same_with_certificates_that_were_made_anew(
    config: Path, tmp_path: Path
) -> None:
    old, new = (files_of(temporary(), tmp_path / name) for name in ("old", "new"))
    with_old, with_new = (digest(config, f"cluster.tls={json.dumps(own)}") for own in (old, new))
    assert with_old == with_new != digest(config)


def test_a_record_can_be_read_when_its_certificates_are_gone(config: Path, tmp_path: Path) -> None:
    own = files_of(temporary(), tmp_path / "own")
    (trial,) = expand(load_experiment(str(config), [f"cluster.tls={json.dumps(own)}"]))
    for path in own.values():
        Path(path).unlink()
    read = trial_from(settings(trial, {}), "here")
    assert read == trial
    with pytest.raises(ConfigurationError, match="there is no such file"):
        security_of(read.config.cluster.tls)


def test_certificates_are_looked_at_before_anything_runs(config: Path, tmp_path: Path) -> None:
    own = files_of(temporary(), tmp_path / "own")
    (trial,) = expand(
        load_experiment(str(config), [f"cluster={{kind: local, tls: {json.dumps(own)}}}"])
    )
    security = security_of(trial.config.cluster.tls)
    assert security is not None
    assert security.tls_worker_cert == own["cert"]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("tls: on", "expected off, temporary, or {ca_file"),
        ("tls: {ca_file: /nowhere, cert: /nowhere}", "/nowhere: there is no such file"),
        ("tls: {cert: /nowhere}", "is missing"),
        ("tsl: temporary", "did you mean 'tls'?"),
    ],
)
def test_what_cannot_work_is_refused(config: Path, setting: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_experiment(str(config), [f"cluster={{kind: local, {setting}}}"])
    assert told in str(caught.value)


@pytest.mark.cluster
def test_a_whole_trial_over_tls_through_a_kill(tmp_path: Path, scratch: Path) -> None:
    changes = {
        "training": {"workers": 2, "updates": 150, "compute_seconds": 0.02},
        "recovery": "chain",
        "faults": [{"kind": "kill", "target": "server-0", "at_updates": 60}],
        "cluster": {"kind": "local", "tls": "temporary"},
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({**SMALL, **changes}))
    record = tmp_path / "results" / "small" / "seed-0" / EVENTS_FILE
    with subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "run", "small.yaml"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        eventually(lambda: record.exists() and '"Applied"' in record.read_text(), 60)
        listening = ports_below(process.pid)
        answers = {port: said_plainly(port) for port in listening}
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert len(listening) >= 2 * 5, "two of each node, and of the scheduler"
    # A TLS server may say by an alert (21) that it was sent something else.
    assert {answer[:1] for answer in answers.values()} <= {b"", b"\x15"}, answers
    ended = read_record(record).ended
    assert ended is not None
    assert ended.status == "valid", ended.reason
    assert list(scratch.rglob("*.pem")) == []
