"""The check of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from dps.cluster.transport import memory
from dps.cluster.transport.memory import Mapping
from flows.cli.doctor import Finding, examine
from flows.tracking.tracker import Tracker
from tests.support.damage import database_with_a_name_that_is_no_text


def found(here: Path, store: str | None = None) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(here, store)}


def test_a_fresh_directory_is_fine_and_stays_fresh(tmp_path: Path) -> None:
    findings = found(tmp_path)
    assert all(finding.good for finding in findings.values())
    assert {"dps", "python", "distributed", "mlflow", "cores", "memory"} <= set(findings)
    assert findings["dataset digits"].found == "scikit-learn"
    assert findings["store"].found.startswith(f"sqlite:///{tmp_path.resolve()}/mlruns/mlflow.db")
    assert list(tmp_path.iterdir()) == []


def test_whether_processes_can_share_memory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(tmp_path)["transport"].found.startswith("shared memory between processes here")

    def refuse(size: int) -> Mapping:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(memory, "create", refuse)
    finding = found(tmp_path)["transport"]
    assert finding.good
    assert "no shared memory between processes: [Errno 1] Operation not permitted" in finding.found


@pytest.mark.slow
def test_a_store_that_is_there_is_tried(tmp_path: Path) -> None:
    Tracker("demo", tmp_path)
    assert found(tmp_path)["store"].good
    (tmp_path / "mlruns" / "mlflow.db").write_text("this is no database, but long enough to be one")
    damaged = found(tmp_path)["store"]
    assert not damaged.good
    assert "damaged: file is not a database. Move the file away" in damaged.found


def test_a_store_with_a_name_that_is_no_text_is_damaged(tmp_path: Path) -> None:
    database_with_a_name_that_is_no_text(tmp_path / "mlruns" / "mlflow.db")
    damaged = found(tmp_path)["store"]
    assert not damaged.good
    assert "damaged: a name in it is no text. Move the file away" in damaged.found


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file where the folder should be")
    (tmp_path / "mlruns").write_text("a file where the folder should be")
    findings = found(tmp_path)
    assert not findings["results"].good
    assert "cannot be written" in findings["results"].found
    assert not findings["store"].good


def test_a_named_store_is_shown(tmp_path: Path) -> None:
    finding = found(tmp_path, "http://tracking.example:5000")["store"]
    assert finding.found.startswith("http://tracking.example:5000")
