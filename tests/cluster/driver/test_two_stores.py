"""Real SIGKILL of one of two stores in the middle of training: nothing is lost, and all goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dps import Continue, Recovery, SharedStore
from dps.cluster.names import NodeSpec
from dps.events import Restored
from dps.protocol.timings import Timings
from tests.cluster.driver.test_kill import (
    Run,
    assert_nothing_lost_and_nothing_twice,
    restoration,
    training,
)
from tests.support.training import SECONDS, nodes
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

# So that on a busy machine nobody else is given up: that a process was killed shows at once.
PATIENT = Timings(lease=10.0)
RECOVERY = Recovery(SharedStore(stores=2), Continue())
SPECS = [*nodes(store=True), NodeSpec("store-1", "store")]


def kill(run: Run, *names: str) -> None:
    """SIGKILL nodes at once; return when the others know it."""
    lost = {node.address for node in run.ps.nodes if node.name in names}
    for name in names:
        os.kill(run.cluster.pids[name], signal.SIGKILL)

    def used() -> set[str]:
        return run.serving() | {store.address for store in run.ps.table().stores}

    eventually(lambda: not used() & lost, SECONDS)


def bring(run: Run, *names: str) -> None:
    """Start nodes; return when all stores are used again."""
    for name in names:
        run.cluster.start(NodeSpec(name, name.partition("-")[0]))
    eventually(lambda: len(run.ps.table().stores) == 2, SECONDS)


def test_a_store_is_lost_then_the_other_one_with_a_server(tmp_path: Path) -> None:
    with training(tmp_path, RECOVERY, SPECS, timings=PATIENT) as run:
        kill(run, "store-0")
        run.advance()
        sources = {event.source for event in run.events.of(Restored)}
        assert sources <= {"initial"}, "no server was lost"
        bring(run, "store-0-b")
        run.advance()
        kill(run, "store-1", "server-0")
        bring(run, "server-0-b", "store-1-b")
        run.advance()
        assert_nothing_lost_and_nothing_twice(run, run.finish())
    assert restoration(run).source == "store"
