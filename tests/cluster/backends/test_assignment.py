"""Which Dask worker becomes which node of a deployment: hosts apart, roles kept, few refused."""

from __future__ import annotations

import re

import pytest

from dps.cluster.backends.assignment import assign, best, eligible, failing_together, too_few
from dps.cluster.names import NodeSpec, Offer, resource_of


def specs(*names: str, threads: int = 1) -> list[NodeSpec]:
    return [NodeSpec(name, resource_of(name), threads) for name in names]


def offers(hosts: str, *, resource: str | None = None, threads: int = 1) -> list[Offer]:
    """One Dask worker for each letter, on the host of that letter."""
    return [
        Offer(f"tcp://{host}:{number}", f"w-{number}", host, threads, resource)
        for number, host in enumerate(hosts)
    ]


def hosts(taken: dict[str, Offer]) -> dict[str, str]:
    return {name: offer.host for name, offer in taken.items()}


CHAINS = specs("server-0", "replica-0-1", "server-1", "replica-1-1")


@pytest.mark.parametrize("where", ["aabb", "abab", "aabbc", "aaabbb"])
def test_replicas_of_a_shard_are_on_different_hosts_where_there_are_enough(where: str) -> None:
    found = assign(CHAINS, offers(where))
    assert found.keys() == {spec.name for spec in CHAINS}
    assert len({offer.address for offer in found.values()}) == len(CHAINS)
    assert hosts(found)["server-0"] != hosts(found)["replica-0-1"]
    assert hosts(found)["server-1"] != hosts(found)["replica-1-1"]
    assert failing_together(hosts(found)) == ()


def test_what_fails_together_is_told_by_host() -> None:
    (told,) = failing_together(hosts(assign(CHAINS, offers("aaaa"))))
    assert told.startswith("replica-0-1, replica-1-1, server-0, server-1 share a host")


def test_two_stores_are_on_hosts_of_their_own() -> None:
    found = assign(specs("server-0", "store-0", "store-1"), offers("aabc"))
    assert sorted(offer.host for offer in found.values()) == ["a", "b", "c"]
    (told,) = failing_together(hosts(assign(specs("store-0", "store-1"), offers("aa"))))
    assert told.startswith("store-0, store-1 share a host")


def test_the_store_is_away_from_servers() -> None:
    wanted = specs("server-0", "server-1", "store-0", "worker-0")
    found = hosts(assign(wanted, offers("aaab")))
    assert found["store-0"] == "b"
    assert {found["server-0"], found["server-1"]} == {"a"}


def test_roles_are_kept_where_any_are_given() -> None:
    roles = [*offers("ab", resource="server"), *offers("cc", resource="worker")]
    able = eligible([*roles, *offers("ddd")])
    found = assign(specs("server-0", "worker-0", "worker-1"), able)
    assert found["server-0"].resource == "server"
    assert {found["worker-0"].resource, found["worker-1"].resource} == {"worker"}
    wanted = specs("server-0", "server-1", "server-2")
    assert len(assign(wanted, able)) == 2
    assert re.search(r"2 as server.*3 as server", str(too_few(wanted, able)))


def test_a_node_goes_to_the_dask_worker_of_its_name() -> None:
    named = Offer("tcp://z:1", "worker-1", "z", 4, None)
    found = assign(specs("worker-0", "worker-1"), [named, *offers("a")])
    assert found["worker-1"] == named


def test_a_node_gets_the_threads_that_it_needs() -> None:
    able = [*offers("a", threads=2), *offers("b", threads=8)]
    wanted = [*specs("server-0"), *specs("worker-0", threads=4)]
    assert hosts(assign(wanted, able)) == {"worker-0": "b", "server-0": "a"}
    large = specs("worker-0", threads=16)
    assert not assign(large, able)
    assert "1 as worker with 16 threads each" in str(too_few(large, able))


def test_too_few_are_refused_with_what_is_needed() -> None:
    error = too_few(specs("server-0", "worker-0"), offers("a"))
    assert re.search(r"has 1 usable .*expected 2 \(1 as server, 1 as worker\)", str(error))


def test_a_replacement_keeps_away_from_the_rest_of_its_chain() -> None:
    free = offers("ab")
    taken = {"replica-0-1": Offer("tcp://a:9", "w", "a", 1, None)}
    found = best(specs("server-0-b")[0], free, taken)
    assert found is not None
    assert found.host == "b"
    assert best(specs("server-0-b")[0], [], taken) is None
