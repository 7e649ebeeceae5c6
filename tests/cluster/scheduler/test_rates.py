"""How fast a group goes, from looks at it."""

from __future__ import annotations

import pytest

from dps.cluster.scheduler.overview import GroupOverview, ShardState, WorkerState
from dps.cluster.scheduler.rates import GroupRates


def shard(version: int | None, updates: int | None, missed: int | None) -> ShardState:
    return ShardState(0, 2, ("server-0",), version, updates, missed)


def group(t: float, state: ShardState, updates: int = 0, active: bool = True) -> GroupOverview:
    worker = WorkerState("worker-0", "node", active, updates, updates, None)
    return GroupOverview("group", t, (state,), (worker,), 0)


def test_rates_and_staleness_are_of_what_came_between_two_looks() -> None:
    rates = GroupRates()
    first, second = shard(100, 100, 1000), shard(150, 150, 1100)
    rates.look(group(10.0, first, 40))
    assert rates.of_shard(first) is None
    assert rates.staleness(first) is None
    rates.look(after := group(15.0, second, 60))
    assert rates.of_shard(second) == pytest.approx(10.0)
    assert rates.of_worker(after.workers[0]) == pytest.approx(4.0)
    assert rates.staleness(second) == pytest.approx(2.0)


def test_only_the_last_seconds_count() -> None:
    rates = GroupRates()
    for t in range(30):
        per_update = 0 if t < 15 else 3
        counted = 10 * t
        rates.look(group(float(t), state := shard(counted, counted, per_update * (counted - 150))))
    assert rates.staleness(state) == pytest.approx(3.0)


def test_another_head_counts_anew_and_one_that_is_down_not_at_all() -> None:
    rates = GroupRates()
    rates.look(group(0.0, shard(100, 100, 500)))
    rates.look(group(1.0, shard(110, 110, 520)))
    rates.look(group(2.0, down := shard(None, None, None)))
    assert rates.of_shard(down) is None
    rates.look(group(3.0, head := shard(112, 2, 2)))
    assert rates.staleness(head) is None
    rates.look(group(4.0, head := shard(122, 12, 42)))
    assert rates.staleness(head) == pytest.approx(4.0)


def test_updates_are_those_that_shards_were_last_known_to_have() -> None:
    def looked(*versions: int | None) -> int | None:
        states = (ShardState(n, 2, (), v, None, None) for n, v in enumerate(versions))
        rates.look(GroupOverview("group", 1.0, tuple(states), (), 0))
        return rates.updates

    rates = GroupRates()
    assert rates.updates is None
    assert looked(800, None) is None, "nobody knows of the other"
    assert looked(810, 700) == 700
    assert looked(820, None) == 700, "it is down, or late"
    assert looked(None, None) == 700
    assert looked(None, 650) == 650, "it was restored with less"
    assert looked(640, 660) == 640


def test_a_worker_that_has_ended_has_no_rate() -> None:
    rates = GroupRates()
    rates.look(group(0.0, shard(1, 1, 0), 1))
    rates.look(end := group(1.0, shard(2, 2, 0), 2, active=False))
    assert rates.of_worker(end.workers[0]) is None


@pytest.mark.parametrize(
    ("epoch", "replicas", "status"),
    [(0, (), "starting"), (1, (), "starting"), (3, (), "down"), (3, ("server-0",), "serving")],
    ids=["asked for", "on its way", "down", "served"],
)
def test_a_shard_that_never_served_is_starting(
    epoch: int, replicas: tuple[str, ...], status: str
) -> None:
    assert ShardState(0, epoch, replicas, None, None, None).status == status
