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

from dps.core.shard import ShardState
from dps.errors import NotServing, StoreUnavailable
from dps.events import (
    CheckpointFailed,
    CheckpointWritten,
    Event,
    IntervalChosen,
    Moved,
    Restored,
)
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.durability import ServerContext
from dps.protocol.executor import INLINE_BYTES, offload
from dps.protocol.messages import Drain
from dps.protocol.recovery import Recovery
from dps.protocol.storage.checkpoint_files import CheckpointFiles
from dps.protocol.storage.checkpoint_schedule import SLOW_SECONDS, Checkpoints
from dps.protocol.tasks import Tasks
from dps.protocol.transport import Endpoint
from dps.sim.network import SimTransport
from dps.sim.process import Process, SimClock
from dps.sim.schedules.strategies import TIMINGS
from dps.sim.world import COORDINATOR
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


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("every", [None, 5])
def test_no_more_is_lost_than_was_acked_in_the_interval(mode: str, every: int | None) -> None:
    lost = []

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        loop = asyncio.get_running_loop()
        acked: list[float] = []

        async def push() -> None:
            while True:
                await client.push(ONES)
                acked.append(loop.time())
                await asyncio.sleep(s.random.uniform(0, 0.05))

        pushing = process.run(push())
        await asyncio.sleep(s.random.uniform(0.2, 1.5))
        crashed = loop.time()
        s.world.crash("server-0", back_after=0.1)
        await until(lambda: len(events(s, Restored)) == 2)
        pushing.cancel()
        version = events(s, Restored)[-1].version
        gone = [at for at in acked if at <= crashed][version:]
        assert all(crashed - at <= 0.4 for at in gone)
        assert every is None or len(gone) <= every
        lost.append(len(gone))

    for seed in range(40):
        recovery = saved(every=every, seconds=0.4, mode=mode)
        in_world(scenario, seed=seed, shards=1, recovery=recovery)
    assert any(lost)


def test_what_is_acked_during_a_write_is_saved_in_time_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its age counts from when it was acked, not from the end of a slow write without it."""
    seconds, slow = 1.0, 0.4

    async def slowly(self: Checkpoints, work: Callable[[], Any]) -> Any:
        await asyncio.sleep(slow)
        return work()

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        loop = asyncio.get_running_loop()
        acked: dict[int, float] = {}
        saved: dict[int, float] = {}

        def note(process: Process, event: Event) -> None:
            if isinstance(event, CheckpointWritten):
                saved[event.version] = loop.time()

        s.world.watchers.append(note)
        for version in (1, 2):
            await client.push(ONES)
            acked[version] = loop.time()
            await asyncio.sleep(seconds / 2 + 0.05)  # then a write is under way
        await until(lambda: 2 in saved)
        assert saved[1] - acked[1] <= seconds
        assert acked[2] < saved[1]
        assert saved[2] - acked[2] <= seconds

    monkeypatch.setattr(Checkpoints, "_in_thread", slowly)
    in_world(scenario, shards=1, recovery=saved(seconds=seconds))


@pytest.mark.parametrize("choices", [{}, {"every": 50}])
def test_what_was_acked_before_a_move_is_saved_in_time_after_it(choices: dict[str, Any]) -> None:
    """Though nothing is pushed after it: the new holder does not know since when it is acked."""

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        loop = asyncio.get_running_loop()
        await client.push(ONES)
        acked = loop.time()
        await s.scaled(Drain(s.world.endpoint("server-0")))
        assert loop.time() - acked < 0.5
        await until(lambda: events(s, CheckpointWritten)[-1].version == 1)
        assert loop.time() - acked <= 1.0
        s.world.crash(s.world.name_of((await s.world.complete()).views[0].chain[0]))
        await s.world.bring_up(["server-1"])
        await until(lambda: len(events(s, Restored)) == 2)
        assert events(s, Restored)[-1].version == 1

    recovery = saved(seconds=1.0, **choices)
    in_world(scenario, shards=1, recovery=recovery, extra=("spare-0",))


@pytest.mark.slow
@pytest.mark.parametrize("every", [None, 5])
def test_a_move_makes_no_loss_larger(every: int | None) -> None:
    """The old holder and the new one are lost together, at any moment of the move."""
    seconds, lost, interrupted = 0.4, 0, 0

    async def scenario(s: Setting) -> None:
        nonlocal lost, interrupted
        process, client = await s.enter("worker-0")
        loop = asyncio.get_running_loop()
        acked: list[float] = []

        async def push() -> None:
            while True:
                await client.push(ONES)
                acked.append(loop.time())
                await asyncio.sleep(s.random.uniform(0, 0.1))

        pushing = process.run(push())
        for slow in ("server-0", "spare-0"):
            s.network.slow("scheduler", slow, 0.05)
        await asyncio.sleep(s.random.uniform(0.1, 0.8))
        await s.ask(COORDINATOR, Drain(s.world.endpoint("server-0")))
        await asyncio.sleep(s.random.uniform(0, 0.6))
        crashed, moved = loop.time(), bool(events(s, Moved))
        for name in ("server-0", "spare-0"):
            s.world.crash(name)
        await s.world.bring_up(["spare-1"])
        await until(lambda: len(events(s, Restored)) == 2)
        pushing.cancel()
        version = events(s, Restored)[-1].version
        gone = [at for at in acked if at <= crashed][version:]
        assert all(crashed - at <= seconds for at in gone)
        assert every is None or len(gone) <= every
        lost += len(gone)
        interrupted += not moved

    for seed in range(12):
        recovery = saved(every=every, seconds=seconds)
        in_world(scenario, seed=seed, shards=1, recovery=recovery, extra=("spare-0",))
    assert lost
    assert 0 < interrupted < 12


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices", [{"every": 6}, {"seconds": 1.0}, {"every": 6, "seconds": 1.0, "mode": "sync"}]
)
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


def test_a_newcomer_acks_nothing_before_what_it_was_given_is_saved() -> None:
    """It does not know since when that is acked."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        (state,) = await s.states()
        wanted = Checkpoint(path="memory://newcomer", seconds=1.0)
        group, clock = s.world.group, SimClock(process)
        transport = SimTransport(s.world.network, process)
        tools = transport, clock, lambda event: None, unexpected(), no_store
        context = ServerContext(0, "", group.coordinator, group.timings, *tools, name="another")
        keeper = wanted.persistence(context)
        keeper.take_over(0, state.version)
        with unwritable(), pytest.raises(StoreUnavailable, match="no space"):
            await keeper.commit(1, state)
        await keeper.commit(1, state)
        assert keeper.saved == state.version
        await keeper.close()

    in_world(scenario, shards=1)


def test_what_waits_for_a_write_goes_into_it() -> None:
    """One write for a round that would break the promise, however much of it is not acked yet."""

    async def scenario(s: Setting) -> None:
        process, _ = await s.enter("worker-0")
        (state,) = await s.states()
        wanted = Checkpoint(path=f"memory://saving-{next(_numbers)}", every=4)
        group, clock = s.world.group, SimClock(process)
        transport = SimTransport(s.world.network, process)
        written: list[int] = []

        def note(event: Event) -> None:
            if isinstance(event, CheckpointWritten):
                written.append(event.version)

        tools = transport, clock, note, unexpected(), no_store
        context = ServerContext(0, "", group.coordinator, group.timings, *tools, name="rounds")
        keeper = wanted.persistence(context)
        await keeper.begin(1, state)
        for version in (3, 6, 9):
            await keeper.commit(1, replace(state, version=version, index=version))
        assert written == [0, 3, 9], "6 waited for 3 to be saved, and 9 for a write of its own"
        await keeper.close()

    in_world(scenario, shards=1)


def test_the_timer_starts_again_when_a_server_has_its_files_back() -> None:
    async def scenario(s: Setting) -> None:
        process, _ = await s.enter("worker-0")
        (state,) = await s.states()
        states = [replace(state, version=version, index=version) for version in range(3)]
        wanted = Checkpoint(path=f"memory://saving-{next(_numbers)}", seconds=0.4)
        group, clock = s.world.group, SimClock(process)
        transport = SimTransport(s.world.network, process)
        tools = transport, clock, lambda event: None, unexpected(), no_store
        context = ServerContext(0, "", group.coordinator, group.timings, *tools, name="back")
        keeper, newcomers = wanted.persistence(context), wanted.persistence(context)
        await keeper.begin(1, states[0])
        await keeper.commit(1, states[1])
        newcomers.take_over(0, 1)
        await newcomers.begin(2, states[1])
        await asyncio.sleep(1.0)  # the timer is refused the files of a later epoch
        await keeper.begin(3, states[1])  # the newcomer was lost before it served
        await keeper.commit(3, states[2])
        await until(lambda: keeper.saved == 2, within=0.4)
        await keeper.close()

    in_world(scenario, shards=1)


def test_a_write_that_hangs_keeps_no_update_from_being_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Updates are applied in the threads of the event loop, of which there may be few."""
    hanging, let_go = threading.Event(), threading.Event()

    def hang(self: CheckpointFiles, *args: Any) -> int:
        hanging.set()
        let_go.wait(60.0)
        return 0

    class RealClock:
        now, monotonic = staticmethod(time.time), staticmethod(time.monotonic)

    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        here = Endpoint("here", "")
        tools: Any = None, RealClock(), lambda event: None, unexpected(), no_store
        context = ServerContext(0, "", here, TIMINGS, *tools, name="g")
        keeper = Checkpoint(path="memory://hangs").persistence(context)
        empty = np.zeros(1, np.uint8)
        writing = asyncio.ensure_future(keeper.begin(1, ShardState(0, 0, 0, empty, {}, {}, {}, {})))
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

    async def hang(self: Checkpoints, work: Callable[[], Any]) -> Any:
        await done.wait()
        return work()

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        monkeypatch.setattr(Checkpoints, "_in_thread", hang)
        await client.push(ONES)
        await asyncio.sleep(SLOW_SECONDS - 1.0)
        assert not events(s, CheckpointFailed)
        await asyncio.sleep(SLOW_SECONDS)
        (told,) = events(s, CheckpointFailed)
        assert told.reason == "version 1 is not written after 30 s; the write goes on"
        done.set()
        await until(lambda: events(s, CheckpointWritten)[-1].version == 1, within=1.0)

    in_world(scenario, shards=1, recovery=saved(every=2))


def test_both_limits_hold_together() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        for _ in range(6):
            await client.push(ONES)
        await asyncio.sleep(0.1)
        assert events(s, CheckpointWritten)[-1].version >= 3, "by the number of updates"
        version = (await s.states())[0].version
        await asyncio.sleep(10.0)
        assert events(s, CheckpointWritten)[-1].version == version, "by the time"

    in_world(scenario, recovery=saved(every=6, seconds=10.0))


async def slow_write(self: Checkpoints, work: Callable[[], Any]) -> Any:
    await asyncio.sleep(0.2)
    return work()


def test_the_ack_of_an_update_that_makes_a_write_due_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Checkpoints, "_in_thread", slow_write)

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
    monkeypatch.setattr(Checkpoints, "_in_thread", slow_write)

    async def scenario(s: Setting) -> None:
        end = await keep_pushing(s, 3)
        await asyncio.sleep(60)
        calm = events(s, IntervalChosen)[-1]
        assert 4 <= events(s, IntervalChosen)[0].every < calm.every <= 400
        assert 0.1 < calm.cost <= 0.2
        for _ in range(12):
            s.world.crash("server-0", back_after=0.1)
            await asyncio.sleep(4)
        chosen = events(s, IntervalChosen)
        assert chosen[-1].every < calm.every
        assert chosen[-1].mtbf < calm.mtbf
        assert {event.epoch for event in chosen} > {1}
        end()

    recovery = saved(every="auto", least=4, most=400, mode="sync")
    in_world(scenario, shards=1, recovery=recovery)


def test_where_no_ack_waits_for_a_write_there_is_a_pause_between_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Writes cost nothing then, but what goes on without one must be seen."""
    monkeypatch.setattr(Checkpoints, "_in_thread", slow_write)

    async def scenario(s: Setting) -> None:
        end = await keep_pushing(s, 3)
        await asyncio.sleep(30)
        chosen = events(s, IntervalChosen)[-1]
        assert chosen.cost < 0.05
        assert chosen.every >= 2 * 0.2 * chosen.rate
        assert chosen.every <= 400
        end()

    in_world(scenario, shards=1, recovery=saved(every="auto", least=4, most=400))


def test_with_a_chosen_interval_acks_wait_rather_than_exceed_it() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        acked = 0

        async def push() -> None:
            nonlocal acked
            while True:
                await client.push(ONES)
                acked += 1

        with unwritable():
            pushing = process.run(push())
            await asyncio.sleep(5.0)
        assert acked == 6, "nothing has been measured, so that it is the least"
        pushing.cancel()

    in_world(scenario, shards=1, recovery=saved(every="auto", least=6, most=400))


def test_servers_know_of_the_failures_of_all_shards() -> None:
    async def scenario(s: Setting) -> None:
        began = asyncio.get_running_loop().time()
        await s.world.complete()
        await asyncio.sleep(20)
        s.world.crash("server-0", back_after=0.5)
        await asyncio.sleep(20)
        s.world.crash("server-0", back_after=0.5)
        await asyncio.sleep(20)
        views = (await s.world.complete()).views
        passed = asyncio.get_running_loop().time() - began
        for view in views:
            history = s.world.hosts[view.chain[0].address]._history
            assert history.failures == 2
            assert history.exposure == pytest.approx(2 * passed - 2 * 0.6, abs=1.5)

    in_world(scenario, shards=2, recovery=saved(every="auto"))


def test_a_server_whose_files_a_later_one_has_taken_over_stops_writing() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("worker-0")
        await client.push(ONES)
        keeper = s.world.hosts[s.world.endpoint("server-0").address].replica(0)._persistence
        files, state = keeper._files, (await s.states())[0]  # type: ignore[attr-defined]
        files.write(9, state)
        push = process.run(client.push(ONES))
        await asyncio.sleep(5.0)
        failures = events(s, CheckpointFailed)
        assert [f"epoch 9, not {e.epoch}" in e.reason for e in failures] == [True]
        assert not push.done(), "nothing that cannot be saved is acked"
        push.cancel()

    in_world(scenario, shards=1, recovery=saved(every=1))
