"""Calls to several processes of which each knows enough."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from dps.errors import DpsError, NotServing, StaleEpoch, Unreachable
from dps.protocol.answers import answers_of
from dps.sim.loop import run

GRACE = 0.5


async def after(seconds: float, answer: int | Exception) -> int:
    await asyncio.sleep(seconds)
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.mark.parametrize(
    ("calls", "expected", "seconds"),
    [
        ([], [], 0.0),
        ([(0.3, 1), (0.1, 2)], [1, 2], 0.3),
        ([(0.1, Unreachable("a")), (0.2, 2)], [2], 0.2),
        ([(9.0, 1), (0.2, 2), (0.4, 3)], [2, 3], 0.9),
        ([(9.0, NotServing("late")), (3.0, 2)], [2], 3.5),
    ],
)
def test_those_that_answer_are_enough_and_others_have_a_moment_more(
    calls: list[tuple[float, int | Exception]], expected: list[int], seconds: float
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert await answers_of([after(*call) for call in calls], GRACE) == expected
        assert loop.time() == pytest.approx(seconds)

    run(scenario, Random(0))


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        ([(0.2, Unreachable("a")), (0.1, NotServing("b"))], Unreachable),
        ([(0.2, StaleEpoch("another epoch")), (0.1, 1)], StaleEpoch),
    ],
)
def test_what_is_more_than_out_of_reach_is_raised(
    calls: list[tuple[float, int | Exception]], error: type[DpsError]
) -> None:
    async def scenario() -> None:
        with pytest.raises(error):
            await answers_of([after(*call) for call in calls], GRACE)

    run(scenario, Random(0))
