"""The ring of consistent hashing: who owns a key, how even the loads are, what a change moves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dps.core.placement import HashRing, apart, hashes

SERVERS = ["a", "b", "c", "d", "e"]
KEYS = hashes([f"w{i}" for i in range(785)])
NAMES = st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=8, unique=True)


def owners_of(ring: HashRing, keys: np.ndarray) -> np.ndarray:
    """The number of the server of each hash of a key."""
    return np.asarray(ring.owners[np.searchsorted(ring.points, keys) % len(ring.points)])


@pytest.mark.parametrize("virtual_nodes", [1, 100])
def test_a_key_belongs_to_the_server_whose_point_comes_next(virtual_nodes: int) -> None:
    points = {
        int(hashes([f"{name}#{i}"])[0]): number
        for number, name in enumerate(SERVERS)
        for i in range(virtual_nodes)
    }
    found = owners_of(HashRing.of(SERVERS, virtual_nodes), KEYS)
    for key, owner in zip(KEYS.tolist(), found.tolist(), strict=True):
        following = min((p for p in points if p >= key), default=min(points))
        assert owner == points[following]


@given(NAMES, st.integers(1, 20), st.text(max_size=5))
def test_successors_are_all_servers_once_and_the_owner_is_the_first(
    servers: list[str], virtual_nodes: int, key: str
) -> None:
    ring = HashRing.of(servers, virtual_nodes)
    found = ring.successors(key)
    assert sorted(found) == list(range(len(servers)))
    assert found[0] == int(owners_of(ring, hashes([key]))[0])


@given(NAMES, st.integers(1, 20), st.integers(0, 7), st.integers(1, 3), st.integers(0, 3))
def test_who_leaves_or_comes_changes_the_owners_of_its_own_keys_alone_and_by_one(
    servers: list[str], virtual_nodes: int, which: int, replicas: int, machines: int
) -> None:
    """Read backwards it is the same for one that comes. With 0 machines each has one of its own."""
    gone = servers[which % len(servers)]
    rest = [name for name in servers if name != gone]
    on = {name: str(i % machines) if machines else "" for i, name in enumerate(servers)}

    def owners(names: list[str], key: str) -> list[str]:
        following = [names[i] for i in HashRing.of(names, virtual_nodes).successors(key)]
        return apart(following, on.__getitem__, replicas)[:replicas]

    for key in (f"shard-{i}" for i in range(16)):
        before = owners(servers, key)
        after = owners(rest, key) if rest else []
        assert len(before) == min(replicas, len(servers))
        if gone not in before:
            assert after == before
        else:
            kept = {name for name in before if name != gone}
            assert kept <= set(after)
            assert len(after) == min(replicas, len(rest))


@given(NAMES, st.integers(1, 4), st.integers(1, 4))
def test_the_first_replicas_are_on_as_many_machines_as_there_are(
    servers: list[str], machines: int, replicas: int
) -> None:
    on = {name: str(len(name) % machines) for name in servers}
    found = apart(servers, on.__getitem__, replicas)
    assert sorted(found) == sorted(servers)
    first = found[:replicas]
    assert len({on[name] for name in first}) == min(len(first), len(set(on.values())))


@pytest.mark.parametrize(("servers", "virtual_nodes"), [(4, 16), (16, 256)])
def test_more_virtual_nodes_share_the_ring_out_more_evenly(
    servers: int, virtual_nodes: int
) -> None:
    """If points fall on the ring at random, a server's part of it is Beta(v, (n - 1)v)."""
    keys = hashes([f"key-{i}" for i in range(30_000)])
    shares: list[float] = []
    for naming in range(320 // servers):
        ring = HashRing.of([f"{naming}/{i}" for i in range(servers)], virtual_nodes)
        shares += (np.bincount(owners_of(ring, keys), minlength=servers) / len(keys)).tolist()
    expected = stats.beta(virtual_nodes, (servers - 1) * virtual_nodes)
    assert stats.kstest(shares, expected.cdf).pvalue > 0.01
    assert np.std(shares) / np.mean(shares) < 1.15 / math.sqrt(virtual_nodes)
