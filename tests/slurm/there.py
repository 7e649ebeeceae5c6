"""Owns what the tests on Slurm need: is there one, and how its partitions are asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.util import find_spec
from typing import Any

import pytest

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


def skip_without() -> None:
    """Skip the test where there is no Slurm; fail where one was started for it."""
    if not runs():
        assert "SLURM_CONF" not in os.environ, "the Slurm that was started does not answer"
        pytest.skip("no Slurm runs here, or dask-jobqueue is not installed: make slurm-test")
