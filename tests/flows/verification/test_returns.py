"""Kills of supervised trainings: a short series, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from flows.verification.returns import Begun, Return, _Killer, table

SECONDS = 240


@pytest.mark.slow
@pytest.mark.cluster
def test_a_short_series_keeps_every_promise() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "flows.cli", "returns", "--times=1", "--every=50"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = re.findall(r"1 (\w+) +killed after .* lost (\d+)\+(\d+) of 50", ended.stdout)
    assert [whom for whom, *_ in lines] == ["driver", "scheduler"]
    assert all(int(number) <= 50 for _, *numbers in lines for number in numbers)
    assert "No process and no file is left behind." in ended.stdout


def test_whoever_is_no_victim_is_refused() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "flows.cli", "returns", "--kill=server"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 2
    assert "--kill server, expected driver or scheduler" in ended.stderr


def test_a_kill_that_fails_is_raised_to_whoever_waits_for_it(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    begun = json.dumps(asdict(Begun(ended.pid, ended.pid, [])))
    (tmp_path / "begun-0.json").write_text(begun)
    (tmp_path / "notes-0-0").write_text("push 1\nsafe 1\n")
    with pytest.raises(ProcessLookupError):
        _Killer(tmp_path, "driver", 0.0).join()


def test_the_table_has_a_line_for_each_victim() -> None:
    found = [
        Return("driver", 300, 2.5, 2.0, (40, 10), (4, 0), (0, 0)),
        Return("scheduler", 200, 4.0, 3.0, (20, 30), (0, 1), (0, 0)),
        Return("driver", 100, 3.5, 2.0, (20, 0), (0, 0), (0, 0)),
    ]
    _, _, driver, scheduler = table(found, 50).splitlines()
    assert driver.split() == ["driver", "2", "3.00", "s", "3.50", "s", "30", "40", "2"]
    assert scheduler.split() == ["scheduler", "1", "4.00", "s", "4.00", "s", "30", "30", "1"]
