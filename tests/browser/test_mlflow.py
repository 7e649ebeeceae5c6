"""MLflow's pages in a real browser, as `dps ui` links to them."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

import pytest

from flows.analysis.prices import load_prices
from flows.report.html import write_report
from flows.tracking.server import HOST
from flows.tracking.tracker import Tracker
from tests.support.synthetic import read_trials, write_experiment
from tests.support.waiting import eventually

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]

DEADLINE = 180.0  # seconds: MLflow takes many to start, and to draw its first page
TEXT = "return document.body.innerText"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("here")
    folder = write_experiment(here / "results" / "demo")
    tracker = Tracker("demo", here)
    trials = read_trials(folder, load_prices())
    for record, result in trials:
        tracker.track_trial(record, result, folder / result.identity.trial / "events.jsonl")
    figures = folder / "figures"
    tracker.track_experiment(trials, write_report(folder, folder / "report.html"), figures)
    return here


@pytest.fixture(scope="module")
def link(here: Path) -> Iterator[str]:
    """The link to the trials that `dps ui` prints, while it runs."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "flows.cli", "ui", "--port", port]
    with Popen(command, cwd=here, stdout=PIPE, stderr=STDOUT, text=True) as ui:
        assert ui.stdout is not None
        try:
            found, lines = "", []
            while not found or "startup complete" not in lines[-1]:
                lines.append(line := ui.stdout.readline())
                assert line, f"dps ui has ended: {lines}"
                if told := re.match("Trials of demo: (.*)", line):
                    found = told[1]
            yield found
        finally:
            ui.terminate()


def shows(browser: Any, names: list[str]) -> str:
    """Return the text of the page if it has all of these words."""
    text = str(browser.execute_script(TEXT))
    return text if all(name in text for name in names) else ""


def test_the_printed_link_shows_the_trials_as_training_runs(
    browser: Any, link: str, here: Path
) -> None:
    names = [path.name for path in (here / "results" / "demo").glob("*.seed-*")]
    assert len(names) > 10
    browser.get(link)
    text = eventually(lambda: shows(browser, ["dps/demo", *names]), DEADLINE)
    assert "Judges" not in text, "what MLflow offers for language models"
