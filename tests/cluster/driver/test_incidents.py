"""What the driver hears of failovers, losses and missing copies, on simulated processes."""

from __future__ import annotations

import asyncio
import logging
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dps import Chain, CopiesMissingWarning, Recovery
from dps.cluster.driver.news import GRACE_SECONDS, IncidentWatch, News
from dps.protocol.client.routing_table import Router
from dps.protocol.messages import GetIncidents
from tests.simulator.network import SimTransport
from tests.simulator.world import COORDINATOR
from tests.support.worlds import Setting, in_world, until

ONES = {"w": np.ones(40)}
ELSEWHERE: Any = SimpleNamespace(scheduler=SimpleNamespace(address="tcp://elsewhere:1"))


async def watching(s: Setting) -> tuple[Router, News, IncidentWatch]:
    """A driver that follows the table, and what it hears."""
    router = Router(s.world.group, SimTransport(s.network, s.network.process("driver-2")))
    news = News(ELSEWHERE)
    watch = IncidentWatch(router, news)
    await router.table()
    router.listen(watch.heard)
    return router, news, watch


def heard_by(news: News) -> list[str]:
    """The texts of the warnings that the user of a parameter server gets now."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        news.deliver()
    return [str(each.message) for each in caught]


def test_a_loss_that_is_found_while_another_is_asked_for_is_not_missed() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        router, news, watch = await watching(s)
        await client.push(ONES)
        held = s.held_back(COORDINATOR, lambda message: isinstance(message, GetIncidents))
        for shard in (0, 1):
            s.world.crash(f"server-{shard}", back_after=0.1)
            await until(lambda n=shard: len(s.world.losses.reported) > n, within=5.0)
        await until(lambda: all(view.serving for view in s.world.table.views))
        await until(lambda: s.world.table.losses == watch._announced[0])
        held.set()
        await until(lambda: len(watch.losses) == 2, within=0.5)
        assert ["lost 1 ack" in text for text in heard_by(news)].count(True) == 2
        await router.close()

    in_world(scenario)


def test_what_the_table_has_not_told_yet_is_told_at_the_end() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        router = Router(s.world.group, SimTransport(s.network, s.network.process("driver-2")))
        news = News(ELSEWHERE)
        watch = IncidentWatch(router, news)
        router.listen(watch.heard)  # it has not been asked for a table, and hears of none
        await client.push(ONES)
        s.world.crash("server-0", back_after=0.1)
        await until(lambda: s.world.losses.reported, within=5.0)
        assert watch.losses == ()
        await watch.stop()
        await watch.look()
        assert watch.losses == s.world.losses.reported
        assert len(heard_by(news)) == 1

    in_world(scenario)


def test_a_failover_is_one_line_that_says_who_how_long_what_and_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        router, _, watch = await watching(s)
        for _ in range(3):
            await client.push(ONES)
        s.world.crash("server-1", back_after=0.5)
        await until(lambda: watch.failovers, within=5.0)
        (failover,) = watch.failovers
        assert (failover.shard, failover.lost, failover.node) == (1, "server-1", "server-1")
        assert (failover.source, failover.updates_lost, failover.exact) == ("initial", 3, True)
        assert 0.4 <= failover.seconds < 2.0
        await router.close()

    with caplog.at_level(logging.WARNING, "distributed.client"):
        in_world(scenario)
    (line,) = (r.getMessage() for r in caplog.records if "node server-1" in r.getMessage())
    assert "shard 1: node server-1 was lost (detected by the " in line
    assert "), node server-1 took over after " in line
    assert (
        "because its server was lost, and its state was not kept elsewhere; 3 acknowledged" in line
    )


@pytest.mark.parametrize("lost", [["server-0"], ["replica-0-1"], ["server-0", "replica-0-1"]])
def test_what_a_chain_has_lost_is_told_with_its_cause(lost: list[str]) -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        router, news, watch = await watching(s)
        await client.push(ONES)
        for name in lost:
            s.world.crash(name, back_after=3 * GRACE_SECONDS)
        await until(lambda: watch.failovers, within=10.0)
        line = str(watch.failovers[0])
        if len(lost) == 2:
            assert "because all 2 copies were gone; 1 acknowledged updates were lost" in line
        else:
            assert f"node {lost[0]} was lost" in line
            how = "took over" if lost == ["server-0"] else "serves on"
            assert f"{how} after 0.0" in line
            assert line.endswith("s, with 1 of 2 copies; no update was lost")
            await until(lambda: news._waiting, within=3.0)
            (text,) = heard_by(news)
            assert "shard 0 has 1 of 2 copies" in text
        await s.world.complete()
        await asyncio.sleep(2 * GRACE_SECONDS)
        assert [len(view.chain) for view in watch.views] == [2, 2]
        assert not any("has 1 of" in text for text in heard_by(news))
        await router.close()

    in_world(scenario, recovery=Recovery(Chain()))


def test_a_copy_that_is_back_at_once_is_no_warning() -> None:
    async def scenario(s: Setting) -> None:
        router, news, watch = await watching(s)
        s.world.crash("replica-0-1", back_after=0.1)
        await until(lambda: watch.failovers, within=5.0)
        await s.world.complete()
        await asyncio.sleep(2 * GRACE_SECONDS)
        assert not any(category is CopiesMissingWarning for _, category in news._waiting)
        await router.close()

    in_world(scenario, recovery=Recovery(Chain()))
