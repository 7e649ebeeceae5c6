"""What the system says of processes: which have come from one that may have ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from dps.cluster.backends.processes import started_with
from tests.support.waiting import eventually

VARIABLE = "DPS_TEST_MARK"
SECONDS = 10.0


@contextmanager
def parent_of_one(mark: str) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """A process with a mark in its environment, and the only child of it."""
    environment = {**os.environ, VARIABLE: mark}
    with subprocess.Popen(["sh", "-c", "sleep 600 & wait"], env=environment) as parent:
        [child] = eventually(psutil.Process(parent.pid).children, SECONDS)
        try:
            yield parent, child
        finally:
            child.kill()
            parent.kill()


def test_what_has_come_from_a_process_is_found_also_when_that_has_ended() -> None:
    with parent_of_one("one") as (parent, child), parent_of_one("other"):
        assert {each.pid for each in started_with(VARIABLE, "one")} == {parent.pid, child.pid}
        parent.kill()  # and is a zombie, which can do nothing
        eventually(lambda: list(started_with(VARIABLE, "one")) == [child], SECONDS)
        child.kill()
        eventually(lambda: not list(started_with(VARIABLE, "one")), SECONDS)
        assert len(list(started_with(VARIABLE, "other"))) == 2
