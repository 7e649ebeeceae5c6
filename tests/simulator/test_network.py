"""The simulator itself: virtual time, processes, and the network between them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from dps.errors import DeadlineExceeded, Unreachable
from dps.protocol.messages import CloseGroup, Weights
from dps.protocol.transport import Endpoint
from dps.virtual.loop import Deadlock
from tests.simulator.network import Network, Process, SimTransport, Weather, run

# -- virtual time ----------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, float("inf")])
def test_waiting_for_nothing_is_a_deadlock(timeout: float | None) -> None:
    async def main() -> None:
        async with asyncio.timeout(timeout):
            await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="main"):
        run(main, Random(0))


def test_work_for_an_executor_takes_time_and_passes_errors_on() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, divmod, 7, 2) == (3, 1)
        assert loop.time() > 0
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, divmod, 7, 0)

    run(main, Random(0))


# -- the network -----------------------------------------------------------------------------------


class Pair:
    """Two processes; `b` serves what it is given, after a second."""

    def __init__(self, weather: Weather) -> None:
        self.network = Network(Random(0), weather)
        self.a, self.b = self.network.process("a"), self.network.process("b")
        self.served: list[Any] = []
        self.b.services["echo"] = self._echo

    def call(self, message: Any, deadline: float = 5.0) -> asyncio.Task[Any]:
        transport = SimTransport(self.network, self.a)
        return self.a.run(transport.call(Endpoint(self.b.address, "echo"), message, deadline))

    async def _echo(self, message: Any) -> Any:
        self.served.append(message)
        await asyncio.sleep(1.0)
        return message


def with_pair(
    scenario: Callable[[Pair], Awaitable[None]],
    weather: Weather = Weather(),  # noqa: B008
) -> None:
    async def main() -> None:
        await scenario(Pair(weather))

    run(main, Random(0))


def test_what_arrives_is_a_copy_that_cannot_be_written_to() -> None:
    async def scenario(pair: Pair) -> None:
        sent = Weights(1, 2.0, -1, np.arange(4, dtype=np.uint8))
        call = pair.call(sent)
        sent.values[:] = 9
        got = await call
        assert got.values.tolist() == [0, 1, 2, 3] or got.values.tolist() == [9, 9, 9, 9]
        assert not np.shares_memory(got.values, sent.values)
        assert not got.values.flags.writeable

    with_pair(scenario)


def test_a_crash_breaks_the_calls_to_a_process_and_later_ones_are_refused() -> None:
    async def scenario(pair: Pair) -> None:
        call = pair.call(CloseGroup())
        await asyncio.sleep(0.5)
        pair.network.crash(pair.b)
        with pytest.raises(Unreachable):
            await call
        with pytest.raises(Unreachable):
            await pair.call(CloseGroup())
        assert asyncio.get_running_loop().time() < 1.0

    with_pair(scenario)


def test_a_crash_ends_the_calls_of_a_process_and_nothing_leaves_it() -> None:
    async def scenario(pair: Pair) -> None:
        async def persistent(process: Process) -> None:
            transport = SimTransport(pair.network, process)
            try:
                await asyncio.sleep(10)
            finally:
                await transport.call(Endpoint(pair.b.address, "echo"), CloseGroup(), 1.0)

        task = pair.a.run(persistent(pair.a))
        await asyncio.sleep(0.5)
        pair.network.crash(pair.a)
        await asyncio.sleep(1.0)
        assert task.cancelled()
        assert not pair.served

    with_pair(scenario)


def test_no_call_outlives_its_deadline() -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(DeadlineExceeded):
            await pair.call(CloseGroup(), 0.25)
        assert asyncio.get_running_loop().time() == pytest.approx(0.25)

    with_pair(scenario)


def test_a_cut_link_loses_one_direction() -> None:
    async def scenario(pair: Pair) -> None:
        pair.network.cut("b", "a")
        with pytest.raises(DeadlineExceeded):
            await pair.call(CloseGroup())
        assert len(pair.served) == 1
        pair.network.heal()
        pair.network.cut("a", "b")
        with pytest.raises(DeadlineExceeded):
            await pair.call(CloseGroup())
        assert len(pair.served) == 1

    with_pair(scenario)


def test_lost_messages_break_the_connection_or_leave_it_silent() -> None:
    async def scenario(pair: Pair) -> None:
        outcomes = set()
        for _ in range(50):
            try:
                await pair.call(CloseGroup())
            except (Unreachable, DeadlineExceeded) as error:
                outcomes.add(type(error))
        assert outcomes == {Unreachable, DeadlineExceeded}
        assert 0 < len(pair.served) < 50

    with_pair(scenario, Weather(loss={"control": 0.5}))
