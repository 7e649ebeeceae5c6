"""A broken variant that only shows in the last bit of the weights, which no counter has.

All others are caught by random schedules (`tests/sim/test_mutants.py`).
"""

from __future__ import annotations

from unittest.mock import patch

import pytest

from dps.protocol.rounds import Rounds
from tests.protocol import test_consistency as consistency


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
