"""Injected conditions on the messages of one process."""

from __future__ import annotations

import asyncio

from dps.cluster.transport.calls import BOTH, Condition, Links


def test_a_process_is_cut_off_where_nothing_that_it_sends_arrives() -> None:
    async def scenario() -> None:
        links = Links()
        for condition, cut_off in (
            *((Condition(("out",)), True), (Condition(BOTH), True)),
            *((Condition(("in",)), False), (Condition(BOTH, 0.1), False)),
        ):
            links.impose(0, condition, 600.0)
            assert links.cut_off is cut_off
            links.lift(0)
        assert not links.cut_off

    asyncio.run(scenario())
