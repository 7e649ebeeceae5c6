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
from dps.protocol.client.driver import save_all
from dps.protocol.messages import Push
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.checkpoint_files import CheckpointFiles
from dps.recovery.layered import Layered
from dps.recovery.partial import PartialCheckpoint
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import Recovery
from tests.support.worlds import Setting, happened, in_world, same_state, until

ONES = {"w": np.ones(40)}
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


@pytest.mark.parametrize(
    ("above", "below", "reason"),
    [
        (Checkpoint(), Checkpoint(), r"above=Checkpoint.*, expected Chain\(...\) or SharedStore"),
        (Chain(), PartialCheckpoint(), r"below=PartialCheckpoint.*, expected Checkpoint"),
        (Chain(), Checkpoint(scope="all"), "scope='all', expected 'shard'"),
    ],
    ids=["checkpoint above", "parts below", "all"],
)
def test_what_makes_no_layers_is_refused(above: Any, below: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Layered(above, below)


def test_optimizer_and_dedupe_table_come_back_with_the_weights() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        for _ in range(12):
            await client.push(ONES)
        await save_all(s.world._router, 5.0)
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

    in_world(scenario, shards=1, rule=Adam(0.1), recovery=over(Chain(2), every=100))


def test_acks_go_on_while_nothing_can_be_written_and_what_is_due_is_written_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        right = CheckpointFiles.write
        monkeypatch.setattr(CheckpointFiles, "write", refuse)
        async with asyncio.timeout(2.0):
            for _ in range(40):
                await client.push(ONES)
        await until(lambda: events(s, CheckpointFailed))
        assert not any(written.version for written in events(s, CheckpointWritten))
        monkeypatch.setattr(CheckpointFiles, "write", right)
        await until(lambda: events(s, CheckpointWritten)[-1].version == 40)

    in_world(scenario, shards=1, recovery=over(Chain(2), every=4))


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
