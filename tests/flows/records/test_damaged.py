"""Damaged files of a real experiment: named, never a traceback, and the other trials are shown.

`DPS_DAMAGED` sets how many cases there are, and `DPS_DAMAGED_SEED` which: they are new ones each
time, and so is the record; a failure says what was changed.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.records.owner import exclusive
from flows.records.record import EARLIER, EVENTS_FILE, read_trial
from tests.support.damage import BYTES, dps, flipped, working_in

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CASES = int(os.environ.get("DPS_DAMAGED", "100"))
SEED = int(os.environ.get("DPS_DAMAGED_SEED", random.SystemRandom().randrange(1 << 32)))
EVERY = 25  # cases to one report, which takes seconds

SMALL: dict[str, Any] = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"workers": 1, "updates": 60, "compute_seconds": 0.0},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "recovery": {"durability": {"kind": "checkpoint", "every": 10}},
    "faults": [{"kind": "kill", "target": "server-0", "at_updates": 30, "back_after": 0.1}],
    "evaluation": {"every_seconds": 0.1},
    "seeds": [0, 1],
}
STRUCK, OTHER = "seed-0", "seed-1"
DAMAGED = f"{STRUCK} is skipped, because its record is damaged: "


def run(here: Path) -> str:
    """Run the experiment in a process of its own; return what it says."""
    (here / "small.yaml").write_text(yaml.safe_dump(SMALL))
    command = [sys.executable, "-m", "flows.cli", "run", "small.yaml"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    ended = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory in which `dps run` has recorded an experiment."""
    here = tmp_path_factory.mktemp("recorded")
    run(here)
    return here


@pytest.fixture
def here(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "here"))


def record(here: Path, trial: str = STRUCK) -> Path:
    return here / "results" / "small" / trial / EVENTS_FILE


# -- what is promised --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [(b'"accuracy":0.', b'"accuracy":1.'), (b'"staleness":[0,', b'"staleness":[0.')],
)
def test_one_flipped_bit_is_found_and_named(here: Path, before: bytes, after: bytes) -> None:
    data = record(here).read_bytes()
    assert sum((a ^ b).bit_count() for a, b in zip(before, after, strict=True)) == 1
    number = data[: data.index(before)].count(b"\n") + 1
    record(here).write_bytes(data.replace(before, after, 1))
    told = f"{EVENTS_FILE}, line {number} does not match its checksum"
    with working_in(here), exclusive(here / "results" / "small"):
        results, report = dps("results", "small"), dps("report", "small")
        compare = dps("compare", f"small/{STRUCK}", f"small/{OTHER}")
        status = dps("status", "small")
    for ended, code in ((results, 0), (report, 0), (compare, 2)):
        assert (ended.code, ended.trace) == (code, "")
        assert DAMAGED in ended.err
        assert told in ended.err
    assert OTHER in results.out
    assert f"small/{STRUCK}: no record of it is whole" in compare.err
    assert status.code == 0
    assert f"{STRUCK}  damaged" in status.out
    assert "1 done, 1 damaged" in status.out


def test_a_damaged_record_is_set_aside_and_its_trial_runs_again(here: Path) -> None:
    struck = flipped(record(here).read_bytes()[:-1], random.Random(SEED)) + b"\n"
    record(here).write_bytes(struck)
    other = record(here, OTHER).read_bytes()
    said = run(here)
    kept = here / "results" / "small" / EARLIER / f"{STRUCK}.damaged"
    assert "its damaged record is kept" in said
    assert (kept / EVENTS_FILE).read_bytes() == struck
    assert read_trial(record(here)).ended is not None
    assert record(here, OTHER).read_bytes() == other


# -- anything anywhere -------------------------------------------------------------------------


def test_random_damage_ends_in_a_message(here: Path) -> None:
    """Any file of an experiment, any bytes; the other trial is always shown."""
    print(f"DPS_DAMAGED_SEED={SEED}")
    rng, folder = random.Random(SEED), here / "results" / "small"
    with working_in(here), exclusive(folder):
        for number in range(CASES):
            files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
            path, damage = rng.choice([record(here), rng.choice(files)]), rng.choice(BYTES)
            case = f"seed {SEED}, case {number}: {path.relative_to(here)}, {damage.__name__}"
            whole = path.read_bytes()
            path.write_bytes(damage(whole, rng))
            commands = [("results", "small"), ("status", "small")]
            commands += [("report", "small")] * (number % EVERY == 0)
            for command in commands:
                ended = dps(*command)
                told = f"{case}: dps {' '.join(command)}\n{ended.out}{ended.err}{ended.trace}"
                assert not ended.trace, told
                assert ended.code == 0 or (ended.code == 2 and ended.err.startswith("dps: ")), told
                if path == record(here) and command[0] != "report":
                    assert ended.code == 0, told
                    assert OTHER in ended.out, told
            path.write_bytes(whole)
