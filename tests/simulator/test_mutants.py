"""The checks themselves: random schedules catch each of the deliberately broken variants."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from dps.protocol.server.batching import Batching
from tests.protocol.server import test_consistency as consistency
from tests.simulator.broken.variant import hunt
from tests.simulator.broken.variants import VARIANTS
from tests.simulator.schedules.draw import named

BUDGET = 120
# Schedules known to catch what takes longer to find; `make mutants` finds all anew.
KNOWN = {
    "lease not checked on reads": "chain(2) + continue, SSP(1):0",
    "given up, but renewed": "checkpoint + continue:0",
    "released before it is empty": "none, filters:0",
    "updates during a move left out": "worker cache + continue:0",
    "restarted although a replica lives": "chain(3), reads any, pull filters:0",
    "lease not checked at once": "worker cache:4",
    "epoch not checked at once": "worker cache + functions:2:watched",
    "zombie not fenced": "checkpoint + continue:0",
    "tables not replicated": "chain(2) + continue, SSP(1):0",
    "layer restored although the store lives": "store over checkpoint:1:wide",
    "layer restored while a replica is silent": "chain(2) over checkpoint, seconds, elastic:2",
    "layer left to the old tail": "chain(2) over checkpoint, seconds:7",
    "layer stops acks": "chain(2) over checkpoint:2",
    "older checkpoint of the layer restored": "chain(2) over checkpoint, busy:1:wide",
    "epoch not checked again": "chain(2), elastic, pull filters:0",
    "first store used for ever": "stateless, BSP:5:wide",
    "place kept for a worker that has left": "stateless, two stores, SSP(1):20261271000021:wide",
    "lease given out while it is held": "leased, none:4",
    "leases returned by a late request": "leased, chain(2), aggregated:20261292000021:wide",
    "lease counted from the reply": "checkpoint, all, filters:15:wide:watched",
    "lease not checked again": "stateless, BSP:8",
    "given up without proof": "chain(2), busy:14",
    "lost workers asked what they were told": "checkpoint:4",
    "mailbox cleared before apply": "checkpoint + mailbox:90",
    "mailbox cleared before the shard is served": "checkpoint + mailbox:97:wide",
    "rows of summed updates forgotten": "chain(2), aggregated:6",
    "non-atomic publish": "checkpoint, BSP:59",
    "torn checkpoint accepted": "checkpoint, seconds:198",
    "workers forgotten after a loss": "checkpoint, BSP:27",
    "age counted from the end of the write": "checkpoint, seconds:44:wide",
    "bytes not synced": "checkpoint:1:wide",
    "drained, but chosen": "chain(2), elastic:153:wide",
    "folder not synced": "checkpoint:1:wide",
    "forsaken hosts not fenced": "checkpoint, all:25:wide",
    "held update of an earlier incarnation": "checkpoint, BSP:9:wide",
    "incarnations begin again": "checkpoint:11:wide",
    "incarnations of the last shard": "checkpoint:11:wide",
    "late updates of a lost worker": "chain(2) + continue, SSP(1):195:wide",
    "leases on the wall clock": "checkpoint, filters:9:wide",
    "newcomer given what is not committed": "stateless:3:wide",
    "newest cut of each shard": "checkpoint, all:23:wide",
    "no grace after standing still": "chain(2):1:wide",
    "no lease on entering": "none, BSP:192:wide",
    "renewed, though ended": "none:1:wide",
    "replicas share a machine": "chain(2), elastic:7:wide",
    "a second start for the same request": "chain(2):6:wide",
    "slots left out of checkpoints": "checkpoint:1:wide",
    "steps go on with empty slots": "worker cache:1:wide",
    "numbers of an older part": "partial checkpoint:1:wide",
    "slots left out of parts": "partial checkpoint:3:wide",
    "what changes least is never saved": "partial checkpoint:81:wide",
    "ack after one of two stores": "stateless, two stores:1:wide",
    "mail left in one of two mailboxes": "two stores over checkpoint:33:wide",
    "new store counted before its copy is there": "stateless, two stores:0",
    "restored from the newest store": "stateless, two stores, SSP(1):1:wide",
    "store out of reach waited for": "stateless, two stores, SSP(1):7:wide",
    "last store let go as out of reach": "two stores over checkpoint:15:wide",
    "store out of reach counted on": "two stores + wait:21:wide",
    "mail left where it is out of reach": "stateless, pull filters:8",
    "drained store let go too early": "stateless, ring:1:wide",
    "drained store let go by one shard": "stateless, ring:1:wide",
    "busy taken for dead": "chain(2), busy:2:watched",
    "busy worker evicted": "none, BSP:2:watched",
    "patience without end": "checkpoint + mailbox:2:watched",
    "stopped replica taken for a copy": "chain(2), filters:7:wide:watched",
    "last copy killed": "chain(2) + continue, SSP(1):2:watched",
    "killed though it runs again": "chain(3), reads any:3:wide:watched",
    "slow taken for stopped": "chain(2):2:watched",
    "processes of two monitors confused": "chain(2), busy:2:watched",
    "busy successor excluded": "chain(2) over checkpoint, busy:2:watched",
    "busy server without a copy replaced": "none, ring:6:watched",
    "failed host serves on": "chain(3):2:watched",
    "coordinator's tasks not restarted": "chain(2) + functions:2:watched",
    "no allowance for a clock that is slow or stands still": "chain(2), ring:14:watched",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_variant_is_caught(name: str) -> None:
    known = [named(KNOWN[name])] if name in KNOWN else []
    assert hunt(VARIANTS[name], BUDGET, known) is not None


async def round_in_order_of_arrival(self: Batching, complete: bool = False) -> None:
    if self._replica.state.clocks.keys() <= self._held.keys():
        complete_round, self._held = self._held, {}
        for held in complete_round.values():
            held.step.set_result(await self._replica.apply_now(held.operation))


def test_rounds_in_order_of_arrival_are_noticed() -> None:
    """This shows only in the last bit of weights, which no counter has."""
    with (
        patch.object(Batching, "finish", round_in_order_of_arrival),
        pytest.raises((AssertionError, TimeoutError)),
    ):
        consistency.test_bsp_is_the_sequential_computation_whatever_the_schedule()
