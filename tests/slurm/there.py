"""What the tests on Slurm need: is there one, and how its partitions are asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# The partitions of `slurm.conf.in`: servers in one, the rest in the other.
CLUSTER: dict[str, Any] = {
    "kind": "slurm",
    "memory": "500MB",
    "cores": 1,
    "walltime": "00:10:00",
    "queue": "compute",
    "groups": {"server": {"queue": "ps"}},
    "interface": "lo",
    "patience": 60.0,
}


def runs() -> bool:
    """Whether a Slurm answers, and dask-jobqueue is installed."""
    if shutil.which("sinfo") is None or find_spec("dask_jobqueue") is None:
        return False
    return subprocess.run(["sinfo"], capture_output=True).returncode == 0


def go(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have jobs log into a folder, and find the functions of the tests; skipped without Slurm."""
    skip_without()
    patch.chdir(folder)
    patch.setenv("PYTHONPATH", str(ROOT))


def skip_without() -> None:
    """Skip the test where there is no Slurm; fail where one was started for it."""
    if not runs():
        assert "SLURM_CONF" not in os.environ, "the Slurm that was started does not answer"
        pytest.skip("no Slurm runs here, or dask-jobqueue is not installed: make slurm-test")
