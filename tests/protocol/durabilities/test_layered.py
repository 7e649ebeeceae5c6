"""Layers: no ack waits for the checkpoints below, which are gone back to when all above is lost."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import numpy as np
import pytest

from dps.core.rules.rule import Adam
from dps.core.updates import Operation, UpdateId
from dps.errors import ConfigurationError, StoreUnavailable
from dps.events import CheckpointFailed, CheckpointWritten, Event, Restored
from dps.protocol.client.save_all import save_all
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.durabilities.layered import Layered
from dps.protocol.durabilities.partial_checkpoint import PartialCheckpoint
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.messages import Drain, Keepers, Push, Restore
from dps.protocol.recovery import Recovery, with_checkpoint_path
from dps.protocol.storage.checkpoint_files import CheckpointFiles
from dps.protocol.wire import decode, encode
from tests.support.worlds import Setting, happened, in_world, same_state, until

ONES = {"w": np.ones(40)}
ABOVE = {"chain": Chain(2), "store": SharedStore(4)}
_numbers = count()


def over(above: Chain | SharedStore, **choices: Any) -> Recovery:
    below = Checkpoint(path=f"memory://layered-{next(_numbers)}", **choices)
    return Recovery(Layered(above, below))


def events(s: Setting, kind: type[Event], shard: int = 0) -> list[Any]:
    return [event for event in happened(s, kind) if event.shard == shard]


def refuse(self: CheckpointFiles, *args: Any) -> int:
    raise StoreUnavailable("no space")


async def lose_all(s: Setting) -> Restored:
    """Lose every copy of shard 0 above the layer at once; return how it comes back."""
    before = len(events(s, Restored))
    view = (await s.world.complete()).views[0]
    names = [s.world.name_of(member) for member in view.chain]
    for name in [*names, *(["store-0"] if s.world.table.stores else [])]:
        s.world.crash(name, back_after=0.1)
    await until(lambda: len(events(s, Restored)) > before)
    await s.world.complete()
    restored: Restored = events(s, Restored)[-1]
    return restored


@pytest.mark.parametrize("above", ABOVE)
def test_what_others_ask_of_a_durability_it_answers_for_the_layer_that_has_it(above: str) -> None:
    made = Layered(ABOVE[above], Checkpoint(7, path="/checkpoints", keep=3))
    assert (made.replicas, made.needs_store) == ((2, False) if above == "chain" else (1, True))
    assert (made.path, made.keep, made.writes_checkpoints) == ("/checkpoints", 3, True)
    assert (made.seconds, made.restores_together, made.has_layer_below) == (None, False, True)
    assert decode(encode(made)) == made
    assert made.at("/elsewhere").below == Checkpoint(7, path="/elsewhere", keep=3)


def test_a_chain_above_says_who_reads_and_what_is_summed() -> None:
    made = Layered(Chain(3, reads="any", aggregate=4, linger=0.5))
    assert (made.reads, made.aggregate, made.linger) == ("any", 4, 0.5)
    assert made.below == Checkpoint()
    filled = with_checkpoint_path(Recovery(made), "/run").durability
    assert filled == Layered(made.above, Checkpoint(path="/run"))


@pytest.mark.parametrize(
    ("above", "below", "reason"),
    [
        (Checkpoint(), Checkpoint(), r"above=Checkpoint.*, expected Chain\(...\) or SharedStore"),
        (Layered(Chain()), Checkpoint(), r"above=Layered.*, expected Chain"),
        (Chain(), PartialCheckpoint(), r"below=PartialCheckpoint.*, expected Checkpoint"),
        (Chain(), Checkpoint(mode="sync"), "mode='sync', expected 'async'"),
        (Chain(), Checkpoint(scope="all"), "scope='all', expected 'shard'"),
        (Chain(), Checkpoint("auto"), "every='auto', expected a number"),
    ],
    ids=["checkpoint above", "layers above", "parts below", "sync", "all", "auto"],
)
def test_what_makes_no_layers_is_refused(above: Any, below: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Layered(above, below)


@pytest.mark.parametrize("above", ABOVE)
def test_with_every_copy_above_a_shard_loses_what_came_after_the_newest_checkpoint(
    above: str,
) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        for _ in range(25):
            await client.push(ONES)
        await until(lambda: events(s, CheckpointWritten)[-1].version >= 20)
        newest = max(written.version for written in events(s, CheckpointWritten))
        restored = await lose_all(s)
        assert restored.source == "checkpoint"
        assert restored.version >= newest  # what was being written may be complete
        newest = restored.version
        await s.all_of(process.run(client.push(ONES)), within=10.0)
        await until(lambda: s.world.losses.is_settled)
        state, other = await s.states()
        assert (state.version, other.version) == (newest + 1, 26)
        lost = [(loss.shard, loss.updates) for loss in s.world.losses.found]
        assert lost == ([(0, 25 - newest)] if newest < 25 else [])

    in_world(scenario, shards=2, recovery=over(ABOVE[above], every=10))


@pytest.mark.parametrize("above", ABOVE)
def test_optimizer_and_dedupe_table_come_back_with_the_weights(above: str) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        for _ in range(12):
            await client.push(ONES)
        router, transport = s.world._router, s.world._transport
        await save_all(s.world.group, router, transport, 5.0)
        before = (await s.states())[0]
        await lose_all(s)
        view = (await s.world.complete()).views[0]
        after = (await s.states())[0]
        assert before.version == 12
        assert same_state(before, after)
        assert all(slot.any() for slot in after.slots.values())
        size = s.world.group.layout.shards[0].nbytes // 8
        again = Operation("gradient", UpdateId("a", 1, 12), gradient=np.ones(size).view("uint8"))
        assert (await s.ask(view.chain[0], Push(0, view.epoch, again, False, 0.1))).outcome == (
            "duplicate"
        )

    in_world(scenario, shards=1, rule=Adam(0.1), recovery=over(ABOVE[above], every=100))


@pytest.mark.parametrize("above", ABOVE)
def test_while_one_copy_above_lives_nothing_goes_back(above: str) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        for _ in range(5):
            await client.push(ONES)
        await s.lose()
        assert (await s.states())[0].version == 5
        assert {r.source for r in events(s, Restored)} <= {"initial", "store"}

    in_world(scenario, shards=2, recovery=over(ABOVE[above], every=100))


def test_a_last_replica_that_is_only_silent_is_waited_for() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        for _ in range(5):
            await client.push(ONES)
        view = (await s.world.complete()).views[0]
        silent = [s.process_at(member) for member in view.chain]
        for process in silent:
            s.network.pause(process)
        await until(lambda: not s.world.view(0).serving)
        await asyncio.sleep(5)
        for process in silent:
            s.network.resume(process)
        assert (await s.states())[0].version == 5
        assert [r.source for r in events(s, Restored)] == ["initial"]

    in_world(scenario, shards=1, recovery=over(Chain(2), every=100), extra=("spare-0", "spare-1"))


@pytest.mark.parametrize("above", ABOVE)
def test_acks_go_on_while_nothing_can_be_written_and_what_is_due_is_written_after(
    above: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        right = CheckpointFiles.write

        def fail(self: CheckpointFiles, *args: Any) -> int:
            raise StoreUnavailable("no space")

        monkeypatch.setattr(CheckpointFiles, "write", fail)
        async with asyncio.timeout(2.0):
            for _ in range(40):
                await client.push(ONES)
        await until(lambda: events(s, CheckpointFailed))
        assert not any(written.version for written in events(s, CheckpointWritten))
        monkeypatch.setattr(CheckpointFiles, "write", right)
        await until(lambda: events(s, CheckpointWritten)[-1].version == 40)

    in_world(scenario, shards=1, recovery=over(ABOVE[above], every=4))


def test_a_layer_may_be_written_by_the_clock() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES)
        await until(lambda: events(s, CheckpointWritten)[-1].version == 1, within=1.0)
        written = len(events(s, CheckpointWritten))
        await asyncio.sleep(30)
        assert len(events(s, CheckpointWritten)) == written, "there was nothing to write"

    in_world(scenario, shards=1, recovery=over(Chain(2), seconds=1.0))


def test_who_is_the_tail_no_more_leaves_the_layer_to_the_one_that_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        view = (await s.world.complete()).views[0]
        head, tail = (s.world.name_of(member) for member in view.chain)

        def fail(self: CheckpointFiles, *args: Any) -> int:
            raise StoreUnavailable("no space")

        def failures(node: str) -> int:
            return sum(n == node and isinstance(e, CheckpointFailed) for n, e in s.world.events)

        monkeypatch.setattr(CheckpointFiles, "write", fail)
        s.world.crash(tail, back_after=1.0)
        await until(lambda: s.world.view(0).epoch > view.epoch)
        for _ in range(9):
            await client.push(ONES)
        await until(lambda: failures(head) >= 2)
        await s.world.complete()
        await asyncio.sleep(2.0)  # a write may have been under way
        before, of_tail = failures(head), failures(tail)
        for _ in range(9):
            await client.push(ONES)
        await until(lambda: failures(tail) > of_tail + 4)
        assert failures(head) == before

    in_world(scenario, shards=1, recovery=over(Chain(2), every=4))


def test_a_new_tail_writes_what_the_one_before_has_not_though_nothing_follows() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        view = (await s.world.complete()).views[0]
        old = s.world.name_of(view.chain[-1])
        await client.push(ONES)
        assert not any(written.version for written in events(s, CheckpointWritten))
        await s.scaled(Drain(view.chain[-1]))
        await until(lambda: events(s, CheckpointWritten)[-1].version == 1, within=5.0)
        written = [n for n, e in s.world.events if isinstance(e, CheckpointWritten) and e.version]
        assert written
        assert old not in written

    in_world(scenario, shards=1, recovery=over(Chain(2), seconds=60.0), extra=("spare-0",))


def test_a_promoted_tail_goes_on_with_the_layer() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        for _ in range(9):
            await client.push(ONES)
        view = (await s.world.complete()).views[0]
        s.world.crash(s.world.name_of(view.chain[-1]), back_after=0.1)
        await until(lambda: s.world.view(0).epoch > view.epoch)
        for _ in range(9):
            await client.push(ONES)
        await until(lambda: events(s, CheckpointWritten)[-1].version >= 16)

    in_world(scenario, shards=1, recovery=over(Chain(2), every=4))


@pytest.mark.parametrize("every", [None, 100])
def test_a_new_tail_writes_in_time_what_was_acked_before_it_came(every: int | None) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        view = (await s.world.complete()).views[0]
        s.world.crash(s.world.name_of(view.chain[1]), back_after=1.0)
        await until(lambda: len(s.world.view(0).chain) == 1 and s.world.view(0).serving)
        for _ in range(20):
            await client.push(ONES)
        assert not events(s, CheckpointWritten)[-1].version, "it is not due yet"
        await s.world.complete()
        await until(lambda: events(s, CheckpointWritten)[-1].version == 20, within=10.0)
        assert (await lose_all(s)).version == 20

    in_world(scenario, shards=1, recovery=over(Chain(2), every=every, seconds=10.0))


def test_a_new_tail_writes_what_the_one_before_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        view = (await s.world.complete()).views[0]
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointFiles, "write", refuse)
            s.world.crash(s.world.name_of(view.chain[1]), back_after=1.0)
            for _ in range(20):
                await client.push(ONES)
            await until(lambda: events(s, CheckpointFailed))
            await s.world.complete()
            await asyncio.sleep(2.0)
        await until(lambda: events(s, CheckpointWritten)[-1].version == 20, within=10.0)

    in_world(scenario, shards=1, recovery=over(Chain(2), every=10))


@pytest.mark.parametrize("choices", [{"every": 2}, {"seconds": 0.2}, {"every": 2, "seconds": 0.2}])
def test_a_write_that_fails_is_tried_again_after_a_pause(
    choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        monkeypatch.setattr(CheckpointFiles, "write", refuse)
        await client.push(ONES)
        await asyncio.sleep(10.0)
        assert 18 <= len(events(s, CheckpointFailed)) <= 21

    in_world(scenario, shards=1, recovery=over(Chain(2), **choices))


def test_a_host_that_has_the_state_does_not_ask_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store was lost before the shard was served from what it had."""

    def unreadable(self: CheckpointFiles) -> Any:
        raise StoreUnavailable("the path cannot be read")

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES)
        view = (await s.world.complete()).views[0]
        monkeypatch.setattr(CheckpointFiles, "found", unreadable)
        keepers = Keepers(s.world.table.stores, whole=1)
        (host,) = view.chain
        got = Restore(0, view.epoch + 1, host, keepers, since=view.epoch)
        assert (await s.ask(host, got)).version == 1

    in_world(scenario, shards=1, recovery=over(SharedStore(4), every=100))


def test_a_shard_that_is_restored_twice_is_written_by_one_writer() -> None:
    """The coordinator asks again when it has no reply."""

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES)
        view = (await s.world.complete()).views[0]
        await until(lambda: events(s, CheckpointWritten)[-1].version == 1)
        (host,) = view.chain
        await s.ask(host, Restore(0, view.epoch, host, Keepers(s.world.table.stores, whole=1)))
        await asyncio.sleep(10.0)
        assert [written.version for written in events(s, CheckpointWritten)] == [0, 1]

    in_world(scenario, shards=1, recovery=over(SharedStore(4), seconds=1.0))


@pytest.mark.parametrize("above", ABOVE)
def test_a_shard_is_served_from_a_checkpoint_of_its_epoch(above: str) -> None:
    """Which outranks what a server that was replaced may still write."""

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES)
        restored = await lose_all(s)
        before = [e for e in s.world.events if isinstance(e[1], CheckpointWritten | Restored)]
        written, last = (e for _, e in before[-2:])
        assert (last, type(written)) == (restored, CheckpointWritten)
        assert (written.epoch, written.version) == (restored.epoch, restored.version)

    in_world(scenario, shards=1, recovery=over(ABOVE[above], every=100))


@pytest.mark.parametrize("choices", [{"every": 10}, {"seconds": 10.0}], ids=["updates", "seconds"])
def test_what_comes_back_from_the_store_is_written_though_nothing_follows(
    choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointFiles, "write", refuse)
            for _ in range(20):
                await client.push(ONES)
            await s.lose()
        await s.world.complete()
        assert events(s, Restored)[-1].source == "store"
        await until(lambda: events(s, CheckpointWritten)[-1].version == 20, within=12.0)

    in_world(scenario, shards=1, recovery=over(SharedStore(4), **choices))


def test_while_the_store_lives_a_path_that_cannot_be_read_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreadable(self: CheckpointFiles) -> Any:
        raise StoreUnavailable("the path cannot be read")

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES)
        monkeypatch.setattr(CheckpointFiles, "found", unreadable)
        await s.lose()
        async with asyncio.timeout(5.0):
            await client.push(ONES)
        assert (await s.states())[0].version == 2

    in_world(scenario, shards=1, recovery=over(SharedStore(4), every=100))


def test_no_checkpoint_has_what_the_store_has_not() -> None:
    """It is not acked, and another server may go on from the store without it."""

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        await client.push(ONES)
        await until(lambda: events(s, CheckpointWritten)[-1].version == 1)
        (keeper,) = s.world.table.stores
        store = s.process_at(keeper)
        s.network.pause(store)
        pushed = process.run(client.push(ONES))
        await asyncio.sleep(0.3)
        assert events(s, CheckpointWritten)[-1].version == 1
        s.network.resume(store)
        await s.all_of(pushed, within=10.0)
        await until(lambda: events(s, CheckpointWritten)[-1].version == 2)

    in_world(scenario, shards=1, recovery=over(SharedStore(4), every=1))
