"""Background tasks: an exception that nobody foresaw is seen, and what follows is recovery."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dps import Chain, Checkpoint, Recovery, SharedStore
from dps.errors import InternalError
from dps.events import Detected, Restored, TaskFailed
from dps.protocol.client.client import Client
from dps.protocol.client.receipts import Receipts
from dps.protocol.coordinator.coordinator import Coordinator
from dps.protocol.coordinator.shard_controller import ShardController
from dps.protocol.lease import Lease
from dps.protocol.messages import Describe
from dps.protocol.server.commit_log import CommitLog
from dps.protocol.server.shard_server import ShardServer
from dps.recovery.checkpoint_files import CheckpointFiles
from tests.simulator.network import Unforeseen
from tests.support.worlds import TIMINGS, Setting, happened, in_world, until

ONES = {"w": np.ones(40)}


def failing(monkeypatch: pytest.MonkeyPatch, cls: type, method: str, times: int = 1) -> None:
    """Have a method raise what no part of dps knows, for so many times."""
    right, left = getattr(cls, method), [Unforeseen(f"in {method}")] * times

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        if left:
            raise left.pop()
        return right(self, *args, **kwargs)

    monkeypatch.setattr(cls, method, wrong)


SAVED = Recovery(Checkpoint(every=1, mode="sync", path="memory://tasks"))


@pytest.mark.parametrize(
    ("cls", "method", "recovery"),
    [
        (CommitLog, "_commit", Recovery(Chain(2))),
        (Lease, "renew", Recovery(SharedStore())),
        (CommitLog, "_commit", SAVED),
    ],
    ids=["chain", "stateless", "checkpoint"],
)
def test_a_host_whose_task_fails_starts_over_and_its_shards_recover(
    cls: type, method: str, recovery: Recovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        for _ in range(2):
            await client.push(ONES)
        failing(monkeypatch, cls, method)
        pushing = process.run(client.push(ONES))
        await until(lambda: happened(s, TaskFailed), 5.0)
        await s.all_of(pushing, within=5.0)
        (failed,) = happened(s, TaskFailed)
        assert failed.error == f"Unforeseen: in {method}"
        await process.run(client.pull())
        assert client.versions() == (3,)

    in_world(scenario, shards=1, recovery=recovery, extra=("spare-0",))


def test_memory_that_lacks_for_a_checkpoint_only_delays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES)
        right, left = CheckpointFiles.write, [MemoryError("for a test")]

        def write(self: CheckpointFiles, *args: Any) -> int:
            if left:
                raise left.pop()
            return right(self, *args)

        monkeypatch.setattr(CheckpointFiles, "write", write)
        async with asyncio.timeout(5.0):
            await client.push(ONES)
        assert happened(s, TaskFailed) == []
        assert [state.version for state in await s.states()] == [2]

    recovery = Recovery(Checkpoint(every=1, mode="sync", path="memory://lacking"))
    in_world(scenario, shards=1, recovery=recovery)


def test_a_host_that_fails_again_and_again_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect must not keep the group busy with recoveries."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        failing(monkeypatch, CommitLog, "_commit", times=1000)
        pushing = process.run(client.push(ONES))
        await asyncio.sleep(20 * TIMINGS.lease)
        assert len(happened(s, TaskFailed)) < 40
        monkeypatch.undo()
        await s.all_of(pushing, within=5.0)

    recovery = Recovery(Checkpoint(every=1, mode="sync", path="memory://again"))
    in_world(scenario, shards=1, recovery=recovery)


@pytest.mark.parametrize(
    ("cls", "method"), [(ShardController, "_advance"), (Coordinator, "_detected")]
)
def test_the_coordinator_restarts_what_fails(
    cls: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it does so between two steps that belong together."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        failing(monkeypatch, cls, method)
        s.world.crash("server-0")
        await until(lambda: happened(s, TaskFailed), 5.0)
        await s.all_of(process.run(client.push(ONES)), within=5.0)
        assert happened(s, TaskFailed)[0].node == "scheduler"
        assert [state.version for state in await s.states()] == [2]

    in_world(scenario, shards=1, recovery=Recovery(Chain(2)), extra=("spare-0",))


def test_a_client_raises_what_its_tasks_have_failed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        failing(monkeypatch, Receipts, "sent")
        with pytest.raises(InternalError, match="a background task has failed: Unforeseen"):
            await s.all_of(process.run(push_for_ever(client)), within=5.0)

    in_world(scenario, shards=1)


def test_what_a_client_sends_costs_no_host_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("a")
        host = s.world.hosts[(await s.world.complete()).views[0].chain[0].address]
        failing(monkeypatch, ShardServer, "replica")
        with pytest.raises(Unforeseen):
            await host.handle(Describe(0, s.world.view(0).epoch))
        assert happened(s, TaskFailed) == []
        assert happened(s, Detected) == []
        assert len(happened(s, Restored)) == 1

    in_world(scenario, shards=1)


async def push_for_ever(client: Client) -> None:
    while True:
        await client.push(ONES)
        await asyncio.sleep(0.05)
