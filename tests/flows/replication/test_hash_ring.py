"""Consistent hashing: who owns a key, how even the loads are, and what a loss moves."""

from __future__ import annotations

import numpy as np
import pytest

from flows.replication.ftps.hash_ring import HashRing, dps_balance, hashes, lose_first, ring_balance

SERVERS = ["a", "b", "c", "d", "e"]
KEYS = hashes([f"w{i}" for i in range(785)])


@pytest.mark.parametrize("virtual_nodes", [1, 7, 100])
def test_a_key_belongs_to_the_server_whose_point_comes_next(virtual_nodes: int) -> None:
    points = {
        int(hashes([f"{name}#{i}"])[0]): number
        for number, name in enumerate(SERVERS)
        for i in range(virtual_nodes)
    }
    found = HashRing.of(SERVERS, virtual_nodes).owner(KEYS)
    for key, owner in zip(KEYS.tolist(), found.tolist(), strict=True):
        following = min((p for p in points if p >= key), default=min(points))
        assert owner == points[following]


def test_a_loss_moves_the_keys_of_the_lost_server_and_no_others() -> None:
    owned = int(np.count_nonzero(HashRing.of(SERVERS, 100).owner(KEYS) == 0))
    move = lose_first(KEYS, SERVERS, 100)
    assert (move.own, move.others, move.keys) == (owned, 0, 785)


def test_virtual_nodes_balance_the_ring_and_dps_keeps_its_bound() -> None:
    assert ring_balance(KEYS, SERVERS, 1) > ring_balance(KEYS, SERVERS, 100) >= 1
    assert 1 <= dps_balance("w", 785, 5) <= 1.1


def test_a_server_alone_has_everything() -> None:
    assert ring_balance(KEYS, ["a"], 3) == 1
