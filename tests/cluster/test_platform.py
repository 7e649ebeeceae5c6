"""The clock of a process counts the time in which its machine was suspended."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import time
from dps.cluster.platform import SystemClock
print(SystemClock().monotonic() - time.monotonic())
"""
# A time namespace in which the machine has slept for so long.
SUSPENDED = 1000
ASLEEP = ["unshare", "--time", "--boottime", str(SUSPENDED)]


def test_leases_count_suspended_time() -> None:
    try:
        subprocess.run([*ASLEEP, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no namespace of times can be made here: {error}")
    ended = subprocess.run(
        [*ASLEEP, sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert float(ended.stdout) == pytest.approx(SUSPENDED, abs=1.0)
