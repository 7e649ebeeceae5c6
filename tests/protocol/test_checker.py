"""What the checker takes for broken, and what not, where no random schedule shows it.

One broken variant shows only in the last bit of the weights, which no counter has. All others are
caught by random schedules (`tests/sim/test_mutants.py`).
"""

from __future__ import annotations

from unittest.mock import Mock, patch

import numpy as np
import pytest

from dps.core.recovery import Recovery, WorkerCache
from dps.core.shard import initial_state
from dps.events import Restored
from dps.protocol.messages import Install
from dps.protocol.rounds import Rounds
from dps.sim.audit import Auditor
from dps.sim.cases import CASES
from dps.sim.counting import Tally
from dps.sim.injector import Injector
from dps.sim.shapes import name_of
from tests.protocol import test_consistency as consistency
from tests.protocol.test_membership import view_of
from tests.protocol.worlds import Setting, happened, in_world, until


async def round_in_order_of_arrival(self: Rounds, complete: bool = False) -> None:
    """Apply a round's updates in the order in which they came."""
    if self._state().clocks.keys() <= self._held.keys():
        complete_round, self._held = self._held, {}
        for held in complete_round.values():
            held.step.set_result(await self._apply(held.operation))


def test_rounds_in_order_of_arrival_are_noticed() -> None:
    with (
        patch.object(Rounds, "finish", round_in_order_of_arrival),
        pytest.raises((AssertionError, TimeoutError)),
    ):
        consistency.test_bsp_is_the_sequential_computation_whatever_the_schedule(0)


def test_a_shard_that_starts_anew_is_told_from_an_attempt_that_comes_late() -> None:
    """A host gets what it was sent for an epoch that is over; then the shard starts anew."""

    async def scenario(s: Setting) -> None:
        untouched = Mock(spec=Injector, touched=lambda process: False)
        Auditor(s.world, CASES["worker cache"], Tally(1, lambda: False), untouched)
        restored = len(happened(s, Restored))
        s.world.crash("server-0")
        await until(lambda: len(happened(s, Restored)) == restored + 1)
        view = await view_of(s)
        assert [s.world.name_of(member) for member in view.chain] == ["spare-0"]

        await s.world.bring_up(["server-0"])
        host = s.world.endpoint("server-0")
        state = initial_state(params[name_of(0)].view(np.uint8), s.world.group.rule)
        await s.ask(host, Install(0, view.epoch - 1, (host,), state, "initial"))
        assert len(happened(s, Restored)) == restored + 2
        assert not s.network.broken.done()
        assert await view_of(s) == view

        # Now the coordinator is made to forget who has the shard, and has it restored elsewhere.
        tender = s.world._coordinator._tenders[0]
        tender.unsettle(without=view.chain[0])
        tender.wake()
        assert "spare-0 had its state" in str(await s.network.broken)

    params = {name_of(0): np.zeros(9)}
    in_world(scenario, params=params, shards=1, recovery=Recovery(WorkerCache()), extra=["spare-0"])
