"""What a configuration says of TLS, and a whole trial over it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.errors import ConfigurationError
from flows.config.experiment import load_experiment
from flows.config.trials import expand
from flows.records.record import EVENTS_FILE, read_record
from tests.flows.config.test_experiment import SMALL as BASE
from tests.support.stranger import got_by_a_stranger, needs_root
from tests.support.tls import ports_below, said_plainly
from tests.support.waiting import eventually

RECORD = f"results/small/seed-0/{EVENTS_FILE}"
RUN_SECONDS = 150.0  # until a small experiment is over, on a busy machine

SMALL: dict[str, Any] = {
    **BASE,
    "training": {"workers": 1, "updates": 100},
    "server": {"shards": 1},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


def test_a_trial_has_tls_unless_it_is_switched_off(config: Path) -> None:
    def tls(*overrides: str) -> Any:
        (trial,) = expand(load_experiment(str(config), overrides))
        return trial.config.model_dump(mode="json")["cluster"]

    temporary = {"kind": "local", "tls": "temporary"}
    assert tls() == tls("cluster={kind: local}") == tls("cluster.tls=temporary") == temporary
    assert tls("cluster.tls=off") == {"kind": "local", "tls": "off"}


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("tls: on", "expected off, temporary, or {ca_file"),
        ("tls: {ca_file: /nowhere, cert: /nowhere}", "/nowhere: no such file"),
    ],
)
def test_what_cannot_work_is_refused(config: Path, setting: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_experiment(str(config), [f"cluster={{kind: local, {setting}}}"])
    assert told in str(caught.value)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_whole_trial_is_over_tls_through_a_kill(tmp_path: Path, scratch: Path) -> None:
    changes = {
        "training": {"workers": 2, "updates": 150, "compute_seconds": 0.02},
        "recovery": "chain",
        "faults": [{"kind": "kill", "target": "server-0", "at_updates": 60}],
    }
    with running(tmp_path, scratch, **changes) as process:
        listening = ports_below(process.pid)
        answers = {port: said_plainly(port) for port in listening}
        out, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 0, out
    assert "without TLS" not in out
    assert len(listening) >= 2 * 5, "two of each node, and of the scheduler"
    # A TLS server may say by an alert (21) that it was sent something else.
    assert {answer[:1] for answer in answers.values()} <= {b"", b"\x15"}, answers
    ended = read_record(tmp_path / RECORD).ended
    assert ended is not None
    assert ended.status == "valid", ended.reason
    assert list(scratch.rglob("*.pem")) == []


@pytest.mark.slow
@needs_root
@pytest.mark.cluster
@pytest.mark.parametrize("tls", ["default", "off"])
def test_another_user_runs_code_in_a_trial_only_if_tls_is_off(
    tls: str, tmp_path: Path, scratch: Path
) -> None:
    changes: dict[str, Any] = {
        "training": {"workers": 1, "updates": 100_000, "compute_seconds": 0.02},
        "time_limit": 300.0,
        **({} if tls == "default" else {"cluster": {"tls": tls}}),
    }
    with running(tmp_path, scratch, **changes) as process:
        got = got_by_a_stranger(ports_below(process.pid))
        process.terminate()
        out, _ = process.communicate(timeout=RUN_SECONDS)
    assert len(got) >= 2 * 4, "two of each node, and of the scheduler"
    ran = [each for at_port in got.values() for each in at_port if "ran code as 0" in each]
    if tls == "default":
        assert set(map(tuple, got.values())) == {()}, got
        assert "without TLS" not in out
    else:
        assert len(ran) == len(got) / 2, got
        (warning,) = [line for line in out.splitlines() if "without TLS" in line]
        assert "every user of this machine can run code as you" in warning


@contextmanager
def running(here: Path, scratch: Path, **changes: Any) -> Iterator[subprocess.Popen[str]]:
    """`dps run` of a small experiment when it trains, which is ended if it does not end."""
    record = here / RECORD
    (here / "small.yaml").write_text(yaml.safe_dump({**SMALL, **changes}))
    with subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "run", "small.yaml"],
        cwd=here,
        env={**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            eventually(lambda: record.exists() and '"Applied"' in record.read_text(), RUN_SECONDS)
            yield process
        finally:
            process.terminate()
