"""What `dps plan` costs: seconds of a core and memory, for every configuration that is shipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flows.configs import packaged_names

MEGABYTES = 300
# On a quiet machine, 2 s. In tests, beside the import of what reads a configuration (about 0.7 s).
TIMES_THE_IMPORT = 3.5
IMPORT = ["-c", "import flows.config.experiment"]


# Linux counts the memory of who starts a process as that process's, and a test run has much.
MEASURE = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=sys.stderr)
_, status, usage = os.wait4(process.pid, 0)
seconds = usage.ru_utime + usage.ru_stime
print(os.waitstatus_to_exitcode(status), seconds, usage.ru_maxrss / 1024)
"""


def used(here: Path, *arguments: str) -> tuple[int, float, float]:
    """Return exit code, CPU seconds and peak megabytes of a Python process."""
    command = [sys.executable, "-c", MEASURE, sys.executable, *arguments]
    with (here / "out").open("w") as out:
        told = subprocess.run(command, cwd=here, stdout=subprocess.PIPE, stderr=out, check=True)
    code, seconds, megabytes = told.stdout.split()
    return int(code), float(seconds), float(megabytes)


@pytest.mark.slow
@pytest.mark.parametrize("name", packaged_names())
def test_the_plan_of_a_shipped_configuration_takes_little(tmp_path: Path, name: str) -> None:
    code, seconds, megabytes = used(tmp_path, "-m", "flows.cli", "plan", name, "--yes")
    # What is a replication as a whole is none of experiments, and is refused as quickly.
    assert code in (0, 2), (tmp_path / "out").read_text()
    assert megabytes < MEGABYTES
    base = min(used(tmp_path, *IMPORT)[1] for _ in range(2))
    assert seconds < TIMES_THE_IMPORT * base
