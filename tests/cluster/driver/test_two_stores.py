"""Real SIGKILL of one of two stores in the middle of training: nothing is lost, and all goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from operator import gt
from pathlib import Path
from typing import Any

import pytest

from dps import Continue, Recovery, SharedStore
from dps.cluster.names import NodeSpec
from dps.cluster.transport.calls import ClusterTransport
from dps.events import Restored
from dps.protocol.timings import Timings
from dps.protocol.transport import Endpoint
from tests.cluster.driver.test_kill import (
    Run,
    assert_buffered_gradients_were_replayed,
    assert_nothing_lost_and_nothing_twice,
    buffered,
    restoration,
    training,
)
from tests.support.training import SECONDS, nodes, versions
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


async def lose_packets(address: str, until: float = SECONDS) -> None:
    """Have nothing of dps that this process sends reach an address, as a broken link does."""
    send = ClusterTransport._send

    async def lost(self: Any, to: Endpoint, *message: Any) -> Any:
        if to.address == address:
            await asyncio.sleep(until)
        return await send(self, to, *message)

    ClusterTransport._send = lost  # type: ignore[method-assign]


def test_training_goes_on_when_servers_cannot_reach_one_of_two_stores(tmp_path: Path) -> None:
    """Though the scheduler and the workers can, so that nobody is given up."""
    timings = Timings(lease=2.0)
    with training(tmp_path, RECOVERY, SPECS, timings=timings) as run:
        run.advance()
        away = run.ps.table().stores[0]
        run.cluster.client.run(lose_packets, away.address, workers=list(run.serving()))
        run.advance()
        eventually(lambda: not run.ps.table().complete, SECONDS)
        before = versions(run.ps)
        eventually(lambda: all(map(gt, versions(run.ps), before)), SECONDS)
        assert away in run.ps.table().stores
        assert_nothing_lost_and_nothing_twice(run, run.finish())
    assert {event.source for event in run.events.of(Restored)} <= {"initial"}, "no server was lost"


def test_mail_of_shards_that_are_all_down_outlives_a_store(tmp_path: Path) -> None:
    with training(tmp_path, RECOVERY, SPECS, timings=PATIENT) as run:
        kill(run, "server-0", "server-1")
        eventually(lambda: buffered(run), SECONDS)
        kill(run, "store-0")
        for name in ("server-0-b", "server-1-b"):
            run.cluster.start(NodeSpec(name, "server"))
        run.advance()
        assert_nothing_lost_and_nothing_twice(run, run.finish())
    assert_buffered_gradients_were_replayed(run)
    assert restoration(run).source == "store"
