"""How even loads are, on a ring and in blocks, and what the loss of a server moves."""

from __future__ import annotations

import numpy as np

from dps.core.placement.hash_ring import HashRing, hashes
from flows.replication.ftps.balance import dps_balance, lose_first, ring_balance

SERVERS = ["a", "b", "c", "d", "e"]
KEYS = hashes([f"w{i}" for i in range(785)])


def test_a_loss_moves_the_keys_of_the_lost_server_and_no_others() -> None:
    owned = int(np.count_nonzero(HashRing.of(SERVERS, 100).owner(KEYS) == 0))
    move = lose_first(KEYS, SERVERS, 100)
    assert (move.own, move.others, move.keys) == (owned, 0, 785)


def test_virtual_nodes_balance_the_ring_and_dps_keeps_its_bound() -> None:
    assert ring_balance(KEYS, SERVERS, 1) > ring_balance(KEYS, SERVERS, 100) >= 1
    assert 1 <= dps_balance("w", 785, 5) <= 1.1


def test_a_server_alone_has_everything() -> None:
    assert ring_balance(KEYS, ["a"], 3) == 1
