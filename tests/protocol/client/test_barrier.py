"""What is sent to all shards that go back together, and when its acknowledgements count."""

from __future__ import annotations

import asyncio

from dps.protocol.client.barrier import together
from dps.protocol.client.receipts import Receipts
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.messages import Account, Restoration
from dps.protocol.recovery import Recovery
from tests.support.worlds import Setting, in_world


def test_what_a_shard_acknowledges_after_another_one_has_refused_it_counts() -> None:
    """It is not sent again, so it is lost if the shard goes back after that."""

    async def scenario(s: Setting) -> None:
        _, a = await s.enter("a")
        receipts = Receipts(together=True, on_loss=lambda loss: None)
        is_refused = asyncio.Event()

        async def refused() -> None:
            await asyncio.sleep(0.1)  # the other one has been sent it by then
            is_refused.set()

        async def applied() -> None:
            await is_refused.wait()
            await asyncio.sleep(0.1)
            receipts.acked(Account(1, "a", 1, 1, 1))

        await together(
            {0: refused, 1: applied},
            lacking=(0, 1),
            router=a.router,
            acked_in=lambda shard: 1,
            refused=is_refused.is_set,
            complete=receipts.all_acked,
        )
        assert receipts.accounts == (Account(1, "a", 1, 1, 1),)
        receipts.heard([Restoration(1, 3, 1, 1.0, "checkpoint", 0, {}, certain=True)])
        assert [loss.workers for loss in receipts.losses] == [{"a": 1}]

    saved = Recovery(Checkpoint(every=5, scope="all", path="memory://counts-after-a-refusal"))
    in_world(scenario, recovery=saved)


def test_what_one_shard_has_refused_is_sent_again_to_none() -> None:
    """Though one that has acknowledged it goes back before the last one has answered."""

    async def scenario(s: Setting) -> None:
        _, a = await s.enter("a")
        is_refused, asked = asyncio.Event(), [0, 0, 0]

        async def refused() -> None:
            asked[0] += 1
            await asyncio.sleep(0.1)
            is_refused.set()

        async def applied() -> None:
            asked[1] += 1

        async def waits() -> None:
            asked[2] += 1
            await asyncio.sleep(5.0)

        await together(
            {0: refused, 1: applied, 2: waits},
            lacking=(0, 1, 2),
            router=a.router,
            acked_in=lambda shard: 0 if is_refused.is_set() and asked[1] == 1 else 99,
            refused=is_refused.is_set,
            complete=lambda: None,
        )
        assert asked == [1, 1, 1]

    saved = Recovery(Checkpoint(every=5, scope="all", path="memory://not-after-a-refusal"))
    in_world(scenario, recovery=saved)
