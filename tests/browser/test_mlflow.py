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

from flows.metrics.prices import load_prices
from flows.statistics.finished import read_experiment
from flows.tracking.tracker import deliver
from flows.tracking.ui_server import HOST
from tests.support.synthetic import write_experiment
from tests.support.waiting import eventually

pytestmark = [pytest.mark.browser, pytest.mark.slow]

DEADLINE = 180.0  # seconds: MLflow takes many to start, and to draw its first page
TEXT = "return document.body.innerText"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("here")
    folder = write_experiment(here / "results" / "demo")
    deliver(folder, here, None, read_experiment(folder, load_prices()), True, pytest.fail)
    return here


@pytest.fixture(scope="module")
def link(here: Path) -> Iterator[str]:
    """The link to the comparison that `dps ui` prints, while it runs."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "flows.cli", "ui", "--port", port]
    with Popen(command, cwd=here, stdout=PIPE, stderr=STDOUT, text=True) as ui:
        assert ui.stdout is not None
        try:
            found, lines = None, []
            while found is None:
                lines.append(line := ui.stdout.readline())
                assert line, f"dps ui has ended: {lines}"
                found = re.match("Comparison of demo: (.*)", line)
            yield found[1]
        finally:
            ui.terminate()


def shows(browser: Any, names: list[str]) -> str:
    """Return the text of the page if it has all of these words."""
    text = str(browser.execute_script(TEXT))
    return text if all(name in text for name in names) else ""


def test_the_printed_link_compares_the_strategies(browser: Any, link: str) -> None:
    strategies = ("none", "checkpoint", "chain", "stateless")
    names = [f"{name} · {condition}" for condition in ("kill", "no fault") for name in strategies]
    browser.get(link)
    text = eventually(lambda: shows(browser, ["dps/demo", *names]), DEADLINE)
    assert "Judges" not in text, "what MLflow offers for language models"
