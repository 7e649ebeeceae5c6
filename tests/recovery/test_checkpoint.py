"""When checkpoints are written: the promise in updates and in seconds, and what acks wait for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from dps.core.blocks import Layout
from dps.core.checkpoint_interval import FailureHistory
from dps.core.shard import ShardState
from dps.errors import NotServing, StoreUnavailable
from dps.events import CheckpointFailed, CheckpointWritten, Event, IntervalChosen
from dps.protocol.executor import INLINE_BYTES, offload
from dps.protocol.tasks import Tasks
from dps.protocol.transport import Endpoint
from dps.recovery.checkpoint import SLOW_SECONDS, Checkpoint, CheckpointPersistence
from dps.recovery.checkpoint_files import CheckpointFiles
from dps.recovery.durability import ServerContext
from dps.recovery.strategy import Recovery
from tests.simulator.schedules.strategies import TIMINGS
from tests.support.worlds import Setting, happened, in_world, until

ONES = {"w": np.ones(40)}
_numbers = count()


def saved(**choices: Any) -> Recovery:
    return Recovery(Checkpoint(path=f"memory://saving-{next(_numbers)}", **choices))


def no_store() -> Endpoint:
    raise NotServing("there is no store")


def unexpected() -> Tasks:
    """Background tasks none of which may fail."""

    def failed(error: Exception) -> None:
        raise error

    return Tasks(failed)


def events(s: Setting, kind: type[Event], shard: int = 0) -> list[Any]:
    return [event for event in happened(s, kind) if event.shard == shard]


@contextmanager
def unwritable() -> Iterator[None]:
    """Have no checkpoint written."""

    def fail(self: CheckpointFiles, *args: Any) -> int:
        raise StoreUnavailable("no space")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFiles, "write", fail)
        yield


def test_what_is_unsaved_is_written_in_time_though_nothing_follows() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        await client.push(ONES)
        loop = asyncio.get_running_loop()
        acked = loop.time()
        await until(lambda: events(s, CheckpointWritten)[-1].version)
        assert 0.3 < loop.time() - acked < 1.0
        written = len(events(s, CheckpointWritten))
        await asyncio.sleep(30)
        assert len(events(s, CheckpointWritten)) == written, "there was nothing to write"
        await client.push(ONES)
        assert len(events(s, CheckpointWritten)) == written, "no ack waits after a long rest"

    in_world(scenario, recovery=saved(seconds=1.0))


def test_acks_do_not_wait_for_a_write_that_is_under_way() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        for _ in range(3):
            await client.push(ONES)
        with unwritable():
            async with asyncio.timeout(0.5):
                for _ in range(7):
                    await client.push(ONES)
            await asyncio.sleep(0.1)
            assert events(s, CheckpointFailed)

    in_world(scenario, recovery=saved(every=10))


@pytest.mark.parametrize("choices", [{"every": 6}, {"seconds": 1.0, "mode": "sync"}])
def test_while_the_path_cannot_be_written_to_acks_stop_at_the_interval(
    choices: dict[str, Any],
) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        acked: list[int] = []

        async def push() -> None:
            while True:
                acked.append(await client.push(ONES))
                await asyncio.sleep(0.1)

        with unwritable():
            pushing = process.run(push())
            await asyncio.sleep(5.0)
            stopped_at = len(acked)
            assert stopped_at <= 11
            await asyncio.sleep(5.0)
            assert len(acked) == stopped_at
            assert "no space" in events(s, CheckpointFailed)[-1].reason
        await asyncio.sleep(2.0)
        assert len(acked) > stopped_at
        pushing.cancel()

    in_world(scenario, recovery=saved(**choices))


class RealClock:
    now, monotonic = staticmethod(time.time), staticmethod(time.monotonic)


def on_real_time() -> ServerContext:
    tools: Any = None, RealClock(), lambda event: None, unexpected()
    layout = Layout.of(ONES, shards=1).shards[0]
    stores: Any = no_store, no_store, no_store
    here = Endpoint("here", "")
    return ServerContext(0, "", "g", here, TIMINGS, *tools, layout, FailureHistory, *stores)


def state(version: int) -> ShardState:
    return replace(ShardState(0, 0, 0, np.zeros(1, np.uint8), {}, {}, {}, {}), version=version)


def test_a_repeated_restoration_writes_no_state_beside_or_after_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[int] = []
    let_go = threading.Event()

    def write(self: CheckpointFiles, epoch: int, state: ShardState, cut: int | None) -> int:
        written.append(state.version)
        if state.version == 2:
            let_go.wait(60.0)
        return 0

    async def scenario() -> None:
        keeper = Checkpoint(every=2, path="memory://in-order").persistence(on_real_time())
        await keeper.begin(1, state(0))
        await keeper.commit(1, state(2))
        repeated = asyncio.ensure_future(keeper.begin(1, state(1)))
        async with asyncio.timeout(30.0):
            while len(written) < 2:
                await asyncio.sleep(0.01)
        assert not repeated.done()
        let_go.set()
        await repeated
        assert written == [0, 2]
        assert keeper.saved == 2

    monkeypatch.setattr(CheckpointFiles, "write", write)
    asyncio.run(scenario())


def test_a_write_that_hangs_keeps_no_update_from_being_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Updates are applied in the threads of the event loop, of which there may be few."""
    hanging, let_go = threading.Event(), threading.Event()

    def hang(self: CheckpointFiles, *args: Any) -> int:
        hanging.set()
        let_go.wait(60.0)
        return 0

    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        keeper = Checkpoint(path="memory://hangs").persistence(on_real_time())
        writing = asyncio.ensure_future(keeper.begin(1, state(0)))
        try:
            async with asyncio.timeout(30.0):
                while not hanging.is_set():
                    await asyncio.sleep(0.01)
                assert await offload(lambda: "applied", INLINE_BYTES) == "applied"
            assert not writing.done()
        finally:
            let_go.set()
        await writing

    monkeypatch.setattr(CheckpointFiles, "write", hang)
    asyncio.run(scenario())


def test_a_write_that_takes_long_is_told_of_while_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = asyncio.Event()

    async def hang(self: CheckpointPersistence, work: Callable[..., Any], *args: Any) -> Any:
        await done.wait()
        return work(*args)

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        monkeypatch.setattr(CheckpointPersistence, "_in_thread", hang)
        await client.push(ONES)
        await asyncio.sleep(SLOW_SECONDS - 1.0)
        assert not events(s, CheckpointFailed)
        await asyncio.sleep(SLOW_SECONDS)
        (told,) = events(s, CheckpointFailed)
        assert told.reason == "version 1 is not written after 30 s; the write continues"
        done.set()
        await until(lambda: events(s, CheckpointWritten)[-1].version == 1, within=1.0)

    in_world(scenario, shards=1, recovery=saved(every=2))


async def slow_write(self: CheckpointPersistence, work: Callable[..., Any], *args: Any) -> Any:
    await asyncio.sleep(0.2)
    return work(*args)


def test_the_ack_of_an_update_that_makes_a_write_due_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CheckpointPersistence, "_in_thread", slow_write)

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        for number in range(1, 11):
            await client.push(ONES)
            assert events(s, CheckpointWritten)[-1].version == number - number % 5

    in_world(scenario, recovery=saved(every=5, mode="sync"))


async def keep_pushing(s: Setting, workers: int) -> Callable[[], None]:
    """Have workers push every 20 ms; return what ends that."""
    pushing = []
    for number in range(workers):
        process, client = await s.enter(f"worker-{number}")

        async def push(client: Any = client) -> None:
            while True:
                await client.push(ONES)
                await asyncio.sleep(0.02)

        pushing.append(process.run(push()))

    def end() -> None:
        for each in pushing:
            each.cancel()

    return end


def test_a_chosen_interval_grows_while_nothing_fails_and_shrinks_when_servers_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CheckpointPersistence, "_in_thread", slow_write)

    async def scenario(s: Setting) -> None:
        end = await keep_pushing(s, 3)
        await asyncio.sleep(30)
        calm = events(s, IntervalChosen)[-1]
        assert 4 <= events(s, IntervalChosen)[0].every < calm.every <= 400
        assert 0.1 < calm.cost <= 0.2
        for _ in range(6):
            s.world.crash("server-0", back_after=0.1)
            await asyncio.sleep(4)
        chosen = events(s, IntervalChosen)
        assert chosen[-1].every < calm.every
        assert chosen[-1].mtbf < calm.mtbf
        assert {event.epoch for event in chosen} > {1}
        end()

    recovery = saved(every="auto", least=4, most=400, mode="sync")
    in_world(scenario, shards=1, recovery=recovery)
