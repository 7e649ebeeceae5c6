"""The simulated disk: what is synced survives a loss of power, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from dps.protocol.storage.checkpoint_files import make_folder, publish
from dps.sim.disk import SimDisk, disk
from dps.sim.loop import run
from dps.sim.network import Network, Weather

FOLDER = "/d/g/shard-0"


def on(machine: str, work: Callable[[SimDisk], None]) -> SimDisk:
    """Do something on a disk as a process of a machine."""
    there = disk("d")

    async def main() -> None:
        process = Network(Random(0), Weather()).process(machine)
        process.do(lambda: work(there))
        await asyncio.sleep(0)

    run(main, Random(0))
    return there


def _publish(there: SimDisk) -> None:
    make_folder(there, FOLDER)
    publish(there, FOLDER, "a", b"whole")


def test_what_is_published_survives() -> None:
    there = on("m", _publish)
    there.lose_power("m")
    assert there.files == {f"{FOLDER}/a": b"whole"}


def test_what_another_machine_has_in_its_cache_survives() -> None:
    there = on("m", lambda d: d.pipe_file(f"{FOLDER}/a", b"whole"))
    there.lose_power("n")
    assert there.files == {f"{FOLDER}/a": b"whole"}


@pytest.mark.parametrize("left_out", ["sync_file", "sync_folder"])
def test_what_is_not_synced_is_lost(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimDisk, left_out, lambda self, what: None)
    there = on("m", _publish)
    there.lose_power("m")
    assert there.files == ({f"{FOLDER}/a": b""} if left_out == "sync_file" else {})


def test_a_folder_whose_name_is_not_synced_is_lost_with_what_is_in_it() -> None:
    def work(there: SimDisk) -> None:
        there.makedirs(FOLDER)
        publish(there, FOLDER, "a", b"whole")

    there = on("m", work)
    there.lose_power("m")
    assert not there.files


def test_names_reach_the_disk_in_their_order() -> None:
    def work(there: SimDisk) -> None:
        for name in "abcd":
            there.pipe_file(f"/d/{name}", b"x")

    there = on("m", work)
    there.lose_power("m", kept=0.5)
    assert list(there.files) == ["/d/a", "/d/b"]


def test_a_file_that_was_removed_may_be_there_again() -> None:
    def work(there: SimDisk) -> None:
        _publish(there)
        there.rm_file(f"{FOLDER}/a")

    there = on("m", work)
    assert not there.files
    there.lose_power("m")
    assert there.files == {f"{FOLDER}/a": b"whole"}
