"""The node of the only store is drained with real processes, and servers are killed meanwhile."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dps import Continue, Recovery, SharedStore
from dps.cluster.names import NodeSpec
from dps.events import Restored
from tests.cluster.driver.test_kill import (
    assert_nothing_lost_and_nothing_twice,
    restoration,
    training,
)
from tests.cluster.driver.test_two_stores import PATIENT, kill
from tests.support.training import SECONDS, nodes
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

RECOVERY = Recovery(SharedStore(), Continue())
SPECS = [*nodes(store=True), NodeSpec("store-1", "store")]


def test_a_server_is_killed_before_another_store_has_the_states_and_after(tmp_path: Path) -> None:
    """The new store stands still, so that it is filled only when the server has been lost."""
    with training(tmp_path, RECOVERY, SPECS, timings=PATIENT) as run:
        address = {node.name: node.address for node in run.ps.nodes}
        (store,) = run.ps.table().stores  # whichever of the two nodes came first
        used, other = sorted(
            ("store-0", "store-1"), key=lambda name: address[name] != store.address
        )
        with ThreadPoolExecutor(1) as threads:
            os.kill(run.cluster.pids[other], signal.SIGSTOP)
            draining = threads.submit(run.ps.drain, used)
            eventually(lambda: run.ps.table().leaving, SECONDS)
            kill(run, "server-0")
            assert not draining.done()
            os.kill(run.cluster.pids[other], signal.SIGCONT)
            run.cluster.start(NodeSpec("server-0-b", "server"))
            draining.result(SECONDS)
        assert [store.address for store in run.ps.table().stores] == [address[other]]
        eventually(lambda: "store" in {e.source for e in run.events.of(Restored)}, SECONDS)
        run.advance()
        os.kill(run.cluster.pids[used], signal.SIGKILL)
        kill(run, "server-0-b")
        run.cluster.start(NodeSpec("server-0-c", "server"))
        run.advance()
        assert_nothing_lost_and_nothing_twice(run, run.finish())
    assert restoration(run).source == "store"
