"""The page on data and models of one's own: what it has the reader write runs as it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flows.metrics.prices import load_prices
from flows.statistics.finished import read_experiment
from tests.docs.pages import ROOT, fences
from tests.support.commands import dps

PAGE = ROOT / "docs" / "howto" / "own-data.md"
FILES = ["cancer.yaml", "diabetes.yaml", "make_data.py", "mymodel.py"]


def shown(language: str) -> dict[str, str]:
    """What the page has the reader save, or see, by its title."""
    page = PAGE.relative_to(ROOT).as_posix()
    return {f.file_name: f.text for f in fences(language) if f.page == page and f.is_file}


def run(here: Path, *words: str) -> str:
    command = [sys.executable, *words]
    ended = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def write(folder: Path) -> None:
    """Save what the page has the reader save, and make the data."""
    for name, text in {**shown("python"), **shown("yaml")}.items():
        (folder / name).write_text(text)
    run(folder, "make_data.py")


@pytest.mark.slow
def test_own_data_and_an_own_model_go_from_the_page_to_a_report(tmp_path: Path) -> None:
    written = {**shown("python"), **shown("yaml")}
    assert sorted(written) == FILES
    write(tmp_path)
    planned = run(tmp_path, "-m", "flows.cli", "plan", "cancer.yaml")
    assert "18 trials, 18 to run" in planned
    for line in shown("text")["dps plan"].splitlines():
        assert line in planned
    settings = ("--set", "cluster=virtual", "--set", "experiment=cancer-virtual")
    run(tmp_path, "-m", "flows.cli", "run", "cancer.yaml", *settings)
    folder = tmp_path / "results" / "cancer-virtual"
    assert (folder / "report.html").is_file()

    done = read_experiment(folder, load_prices(), pytest.fail)
    assert {each.outcome.status for each in done} == {"valid"}
    assert len(done) == 18
    lost = {each.outcome.identity.trial: each.outcome.row()["updates_lost"] for each in done}
    assert all(count == 0 for trial, count in lost.items() if "chain" in trial)
    assert all(lost[f"none.kill.seed-{seed}"] > 0 for seed in range(3))
    assert {each.outcome.score.key for each in done} == {"auc"}
    assert min(each.outcome.row()["accuracy_final"] or 0.0 for each in done) > 0.97

    again = run(tmp_path, "-m", "flows.cli", "run", "cancer.yaml", *settings)
    assert "18 trials, 0 to run" in again
    text = (tmp_path / "cancer.csv").read_text()
    (tmp_path / "cancer.csv").write_text(text.replace("17.99,", "none,"))
    ended = dps(tmp_path, "plan", "cancer.yaml")
    assert ended.returncode == 2
    assert "cancer.csv, line 2: column 'mean radius' is 'none', expected a number" in ended.stderr
