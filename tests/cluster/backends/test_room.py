"""Which hosts have room for a job, by what Slurm's `sinfo` prints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dps.cluster.backends.slurm import hosts_with_room

ROWS = """\
ps idle idle 0/8/0/8 16000 0
ps mixed mix 6/2/0/8 16000 1000
ps full mix 8/0/0/8 16000 1000
ps taken mix 2/6/0/8 16000 15800
ps begun alloc 0/8/0/8 16000 0
ps busy alloc 8/0/0/8 16000 8000
ps turning alloc+ 1/7/0/8 16000 500
ps ending comp 0/8/0/8 16000 0
ps small idle 0/1/0/1 16000 0
ps gone down 0/0/8/8 16000 0
ps silent idle* 0/8/0/8 16000 0
ps leaving drng 1/7/0/8 16000 0
compute* other idle 0/8/0/8 16000 0
"""


@pytest.fixture(autouse=True)
def _sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "sinfo"
    command.write_text(f"#!/bin/sh\ncat <<'END'\n{ROWS}END\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def test_hosts_have_room_by_their_cores_and_memory_whatever_they_are_doing() -> None:
    found = hosts_with_room("ps", 2, 500.0)
    assert found == {"idle", "mixed", "begun", "turning", "ending"}


def test_the_default_partition_is_the_one_with_a_star() -> None:
    assert hosts_with_room(None, 1, 500.0) == hosts_with_room("compute", 1, 500.0) == {"other"}
