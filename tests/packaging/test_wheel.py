"""The wheel in a new environment outside the clone: the library alone, then the experiments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import scripts
from tests.support.deployment import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

# With the clone on the path, pip would take dps for installed.
ELSEWHERE = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
DEMO = ["run", "demo", "--virtual", "--set", "seeds=[0]"]


class Installed:
    """An environment that has the wheel, and a folder to work in."""

    def __init__(self, folder: Path) -> None:
        self._bin, self.work = folder / "venv" / "bin", folder / "work"
        self.work.mkdir()
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT)
        run(sys.executable, "-m", "venv", folder / "venv")
        (self._wheel,) = folder.glob("dps-*.whl")

    def install(self, extras: str = "") -> None:
        versions = ["--quiet", "--constraint", ROOT / "requirements.lock"]
        run(self._bin / "python", "-m", "pip", "install", *versions, f"{self._wheel}{extras}")

    def __call__(self, command: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._bin / command, *words],
            cwd=self.work,
            env=ELSEWHERE,
            capture_output=True,
            text=True,
            check=False,
        )


def run(*words: object) -> None:
    subprocess.run(list(map(str, words)), check=True, capture_output=True, env=ELSEWHERE)


def test_the_wheel_is_enough_for_a_training_and_an_experiment(tmp_path: Path) -> None:
    installed = Installed(tmp_path)
    installed.install()
    (tutorial, *_) = (script for script in scripts() if script.page == "docs/tutorial.md")
    (installed.work / "program.py").write_text(tutorial.text)
    trained = installed("python", "program.py")
    assert trained.returncode == 0, trained.stderr
    without = installed("dps", "list")
    assert without.returncode == 2
    assert without.stderr.startswith("dps: the command needs typer")
    assert without.stderr.endswith("install dps with its extra `experiments`\n")
    installed.install("[experiments]")
    demo = installed("dps", *DEMO)
    assert demo.returncode == 0, demo.stderr
    assert "Traceback" not in demo.stderr
