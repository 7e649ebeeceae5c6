"""Kills of supervised trainings: a short series, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from dps.core.shard import ShardState
from dps.protocol.storage.checkpoint_files import CheckpointFiles
from tests.soak.counting import Violation
from tests.soak.returns import Begun, Return, _Killer, require_newest, table

SECONDS = 240


def returns(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.soak", "returns", *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("layered", [False, True], ids=["checkpoint", "layered"])
def test_a_short_series_keeps_every_promise(layered: bool) -> None:
    ended = returns("driver", "scheduler", "--times=1", "--every=50", *["--layered"] * layered)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = re.findall(r"1 (\w+) +killed after .* lost (\d+)\+(\d+) of 50", ended.stdout)
    assert [whom for whom, *_ in lines] == ["driver", "scheduler"]
    assert layered or all(int(number) <= 50 for _, *numbers in lines for number in numbers)
    assert "No process and no file is left behind." in ended.stdout


def test_an_unknown_victim_is_refused() -> None:
    ended = returns("driver", "server")
    assert (ended.returncode, ended.stderr) == (2, "server: expected driver or scheduler\n")


def test_a_shard_must_not_go_on_from_an_older_checkpoint_than_the_newest(tmp_path: Path) -> None:
    files = CheckpointFiles(str(tmp_path), 0, keep=2)
    for version in (9, 10):
        files.write(1, ShardState(version, version, 0, np.zeros(0, np.uint8), {}, {}))
    require_newest(tmp_path, 0, 10)
    with pytest.raises(Violation, match="gone back to version 9, though 10 was complete"):
        require_newest(tmp_path, 0, 9)


def test_a_kill_that_fails_is_raised_to_whoever_waits_for_it(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    begun = json.dumps(asdict(Begun(ended.pid, ended.pid, "group", [])))
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
