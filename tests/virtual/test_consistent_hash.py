"""A parameter server whose shards lie on a ring of servers, by its own interface."""

from __future__ import annotations

import numpy as np
import pytest

from dps import SGD, Checkpoint, ConsistentHash, ParameterServer, Recovery
from dps.errors import ConfigurationError
from dps.events import Detected, Killed, Moved, Promoted, ReplicaAdded, Restored
from dps.faults import AtUpdates, Kill
from dps.testing import VirtualCluster
from tests.virtual.training import count

START = {"w": np.zeros(160)}
SHARDS, SERVERS = 16, 4
CHECKPOINTS = Recovery(Checkpoint(every=10))


def holders(ps: ParameterServer) -> list[str]:
    """The node that has each shard now."""
    names = {node.address: node.name for node in ps.nodes}
    return [names[view.chain[0].address] for view in ps.table().views]


def test_the_kill_of_one_of_four_servers_moves_its_shards_and_no_others() -> None:
    kill = Kill("server-1", AtUpdates(20), back_after=None)
    with VirtualCluster(SERVERS, 2, seed=5, faults=[kill]) as cluster:
        with ParameterServer(
            cluster,
            START,
            shards=SHARDS,
            servers=SERVERS,
            optimizer=SGD(1.0),
            recovery=CHECKPOINTS,
            placement="consistent_hash",
            on_event=cluster.note,
            on_loss="ignore",
        ) as ps:
            before, views = holders(ps), ps.table().views
            for future in ps.run(count, workers=2):
                future.result()
            after, raised = holders(ps), {v.shard for v in set(ps.table().views) - set(views)}
        killed = next(event.t for event in cluster.events if isinstance(event, Killed))
    theirs = {shard for shard, node in enumerate(before) if node == "server-1"}
    assert theirs
    assert raised == theirs, "nothing else of the table is new, no epoch either"
    assert {shard for shard in range(SHARDS) if before[shard] != after[shard]} == theirs
    changes = (Detected, Restored, Moved, Promoted, ReplicaAdded)
    since = [e for e in cluster.events if isinstance(e, changes) and e.t > killed]
    assert {event.shard for event in since} == theirs


def test_the_default_spreads_shards_evenly_and_a_ring_need_not() -> None:
    def loads(placement: str | ConsistentHash) -> list[int]:
        with VirtualCluster(SERVERS, 1) as cluster:
            given = {"shards": SHARDS, "servers": SERVERS, "placement": placement}
            with ParameterServer(cluster, START, **given) as ps:  # type: ignore[arg-type]
                found = holders(ps)
        return [found.count(f"server-{i}") for i in range(SERVERS)]

    assert loads("balanced") == [4, 4, 4, 4]
    assert sum(loads(ConsistentHash(1))) == SHARDS
    assert loads(ConsistentHash(1)) != loads(ConsistentHash(64))


def test_a_group_that_is_brought_up_again_has_its_ring_again() -> None:
    with VirtualCluster(SERVERS, 1) as cluster:
        ring, given = ConsistentHash(8), {"shards": SHARDS, "servers": SERVERS}
        with ParameterServer(cluster, START, placement=ring, recovery=CHECKPOINTS, **given) as ps:
            path, before = ps.group.recovery.durability.path, holders(ps)
        assert path is not None
        with ParameterServer.resume(cluster, path) as again:
            assert again.group.placement == ring
            assert holders(again) == before


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"placement": "ring", "servers": 2}, "expected 'balanced', 'consistent_hash' or"),
        ({"placement": "consistent_hash"}, "needs servers="),
    ],
)
def test_what_cannot_be_a_placement_is_refused(choices: dict[str, object], text: str) -> None:
    with VirtualCluster(2, 1) as cluster, pytest.raises(ConfigurationError, match=text):
        ParameterServer(cluster, START, shards=4, **choices)  # type: ignore[arg-type]
