"""Several drivers on one deployment: each has Dask workers of its own, waits its turn, leaves no
trace."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from distributed import Client

from dps import Chain, ParameterServer, Recovery
from dps.cluster.backends import existing
from dps.cluster.backends.existing import ExistingCluster, reserve
from dps.cluster.backends.processes import state_of
from dps.cluster.names import NodeSpec
from dps.cluster.transport.calls import links_of
from dps.errors import CapacityError
from tests.support.deployment import ROOT, deployed, workers
from tests.support.driver import MEMBERS
from tests.support.training import COUNTING, SECONDS, count, counts, nodes, params, results
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

PAIR = nodes(1, workers=1)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A deployment with room for `MEMBERS` and `PAIR`."""
    with deployed(tmp_path_factory.mktemp("deployment"), workers(5)) as address:
        yield address


def kept(dask_scheduler: Any) -> tuple[int, list[str], list[str]]:
    """What trials change in the scheduler."""
    topics = dask_scheduler._broker._topics.items()
    followed = [name for name, topic in topics if name.startswith("dps") and topic.subscribers]
    return dask_scheduler.allowed_failures, list(dask_scheduler.plugins), followed


async def disturbed(dask_worker: Any) -> bool:
    return links_of(dask_worker).disturbed


def test_each_has_nodes_of_its_own_and_the_last_leaves_the_scheduler_as_it_was(
    address: str,
) -> None:
    with Client(address, set_as_default=False) as client:
        before = client.run_on_scheduler(kept)
        with ExistingCluster(address, PAIR) as one:
            with ExistingCluster(address, PAIR) as other:
                assert set(one.pids.values()).isdisjoint(other.pids.values())
                assert (one.room, other.room) == (2, 2)
            assert client.run_on_scheduler(kept)[0] == 0
            pids = one.pids.values()
        assert client.run_on_scheduler(kept) == before
        assert all(state_of(pid) == "running" for pid in pids)
        assert before[0] > 0


def test_a_lost_node_is_replaced_by_one_that_nobody_has(address: str) -> None:
    with ExistingCluster(address, PAIR) as one, ExistingCluster(address, PAIR) as other:
        theirs = other.pids
        one.kill("server-0")
        one.start(NodeSpec("server-0-b", "server"))
        eventually(lambda: "server-0-b" in one.pids, SECONDS)
        assert one.pids["server-0-b"] not in theirs.values()
        assert all(state_of(pid) == "running" for pid in theirs.values())


def test_a_place_that_is_open_goes_to_one_that_is_given_back(address: str) -> None:
    with ExistingCluster(address, MEMBERS, patience=SECONDS) as one:
        with ExistingCluster(address, PAIR, patience=SECONDS) as other:
            theirs = other.pids
            one.start(NodeSpec("server-1", "server"))
            with pytest.raises(CapacityError, match="2 of 2 nodes that other trials use"):
                ExistingCluster(address, PAIR)
            assert "server-1" not in one.pids
        eventually(lambda: "server-1" in one.pids, SECONDS)
        assert one.pids["server-1"] in theirs.values()


def test_who_comes_first_is_served_first(address: str) -> None:
    with Client(address, set_as_default=False) as client:
        ask = partial(client.run_on_scheduler, reserve)
        for name in ("first", "second"):
            ask("enter", name)
        try:
            free = sorted(ask("look", "first")[1])
            assert len(free) == 5
            assert not ask("look", "second")[1]
            assert not ask("take", "second", free[:1])
            assert ask("take", "first", free[:3])
            assert ask("look", "second")[1] == set(free[3:])
            assert not ask("take", "second", free[2:])
            assert ask("take", "second", free[3:])
            ask("leave", "first")
            assert ask("look", "second")[1] == set(free[:3])
        finally:
            for name in ("first", "second"):
                ask("leave", name)


def test_more_than_the_deployment_has_is_refused_and_not_waited_for(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(existing, "JOIN_SECONDS", 0.0)
    with pytest.raises(CapacityError, match="expected 6"):
        ExistingCluster(address, nodes(5, workers=1), patience=SECONDS)


@pytest.mark.slow
def test_what_a_driver_had_that_is_killed_goes_to_the_next(address: str) -> None:
    told: list[str] = []
    command = [sys.executable, "-m", "tests.support.driver", address]
    with (
        Client(address, set_as_default=False) as client,
        ThreadPoolExecutor() as pool,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as driver,
    ):
        assert driver.stdout is not None
        before = client.run_on_scheduler(kept)
        theirs = set(json.loads(driver.stdout.readline()).values())
        opening = pool.submit(ExistingCluster, address, MEMBERS, None, SECONDS, told.append)
        eventually(lambda: told, SECONDS)
        assert told[0].startswith("waiting for 1 of 3 nodes that other trials use")
        driver.kill()
        with opening.result(SECONDS) as cluster:
            assert theirs & set(cluster.pids.values())
            assert not any(client.run(disturbed, workers=list(cluster.seats.specs)).values())
            choices = {"optimizer": COUNTING, "recovery": Recovery(Chain())}
            with ParameterServer(client, params(), seats=cluster.seats, **choices) as ps:
                assert results(ps.run(partial(count, 20))) == [20]
                assert counts(ps) == [20]
        eventually(lambda: client.run_on_scheduler(kept) == before, SECONDS)
