"""The interval of checkpoints: closed forms, what writes hold up, and what is known of failures."""

from __future__ import annotations

import math
from heapq import heappop, heappush

import numpy as np
import pytest
from scipy.special import lambertw
from scipy.stats import gamma

from dps.core.checkpoint_interval import (
    AutoInterval,
    Estimate,
    FailureHistory,
    WriteCosts,
    daly,
)

MTBF = 100.0
COSTS = (0.001, 1.0, 20.0, 100.0, 199.0)


def expected_time(interval: float, cost: float, mtbf: float) -> float:
    """How long a second of training takes in Daly's model, which is exact for a constant rate."""
    return mtbf * math.expm1((interval + cost) / mtbf) / interval


def exact_optimum(cost: float, mtbf: float) -> float:
    """Where its derivative is 0."""
    return float(mtbf * (1 + lambertw(-math.exp(-cost / mtbf - 1)).real))


@pytest.mark.parametrize("cost", COSTS)
def test_dalys_interval_costs_next_to_no_more_than_the_optimum(cost: float) -> None:
    best = expected_time(exact_optimum(cost, MTBF), cost, MTBF)
    assert expected_time(daly(cost, MTBF), cost, MTBF) == pytest.approx(best, rel=0.002)


@pytest.mark.parametrize("cost", [c for c in COSTS if c <= 1])
def test_youngs_interval_is_dalys_where_a_write_costs_little(cost: float) -> None:
    assert daly(cost, MTBF) == pytest.approx(math.sqrt(2 * cost * MTBF), rel=0.1)
    assert daly(cost, MTBF) == pytest.approx(exact_optimum(cost, MTBF), rel=0.01)


def test_a_write_that_costs_more_than_there_is_between_failures_is_begun_once_in_that_time() -> (
    None
):
    assert daly(2 * MTBF, MTBF) == daly(1e9, MTBF) == MTBF
    assert daly(0.0, MTBF) == daly(1.0, 0.0) == daly(0.0, 0.0) == 0.0


@pytest.mark.parametrize(("failures", "exposure"), [(0, 30.0), (1, 30.0), (7, 4000.0)])
@pytest.mark.parametrize(("prior", "shape", "rate"), [(None, 0.5, 0.0), (60.0, 1.0, 60.0)])
def test_failures_are_expected_at_the_posterior_mean_of_their_rate(
    failures: int, exposure: float, prior: float | None, shape: float, rate: float
) -> None:
    expected = gamma.mean(shape + failures, scale=1 / (rate + exposure))
    found = FailureHistory(failures, exposure).mean_time_between(prior)
    assert 1 / found == pytest.approx(expected)


def of_sync_writes(workers: int, gradient: float, write: float, every: int) -> Estimate:
    """Workers that each wait for the ack of one update, which a write that is due holds back."""
    costs, version, writer = WriteCosts(), 0, -1
    waiting: list[int] = []
    events = [(gradient * (1 + i / workers), i) for i in range(workers)]
    for _ in range(500):
        now, worker = heappop(events)
        if worker == writer:
            costs.ends(now)
            if waiting[1:]:
                version += len(waiting[1:])
                costs.came(now, version)
            for each in waiting:
                heappush(events, (now + gradient, each))
            waiting = []
        elif waiting:
            waiting.append(worker)
        else:
            version += 1
            costs.came(now, version)
            if version % every == 0:
                costs.begins(now)
                waiting = [worker]
                heappush(events, (now + write, writer))
            else:
                heappush(events, (now + gradient, worker))
    assert costs.estimate is not None
    return costs.estimate


@pytest.mark.parametrize("workers", [1, 4])
def test_a_write_that_acks_wait_for_costs_its_time_less_what_was_computed_meanwhile(
    workers: int,
) -> None:
    """One worker computes nothing while it waits; the others compute the gradient they are at."""
    gradient, write = 0.1, 2.0
    known = of_sync_writes(workers, gradient, write, every=41)
    assert known.rate == pytest.approx(workers / gradient, rel=0.1)
    assert known.during == pytest.approx(max(1, workers - 1))
    assert known.cost == pytest.approx(write - (workers - 1) * gradient / workers, abs=gradient)


def steady(costs: WriteCosts, rate: float, slowed: float, took: float) -> Estimate:
    """Updates that go on during writes, at a slower rate."""
    now, version = 0.0, 0
    for _ in range(20):
        for _ in range(50):
            now, version = now + 1 / rate, version + 1
            costs.came(now, version)
        costs.begins(now)
        end = now + took
        while (now := now + 1 / slowed) < end:
            version += 1
            costs.came(now, version)
        costs.ends(end)
        version += 1
        costs.came(now, version)
    assert costs.estimate is not None
    return costs.estimate


def test_a_write_that_slows_training_down_costs_what_is_missing() -> None:
    known = steady(WriteCosts(), rate=40.0, slowed=10.0, took=2.0)
    assert known.cost == pytest.approx(2.0 * (1 - 10 / 40), rel=0.1)


def test_a_pause_of_training_is_no_cost_of_the_write_before_it() -> None:
    costs = WriteCosts()
    for version in range(1, 11):
        costs.came(version * 0.1, version)
    costs.begins(1.0)
    costs.ends(1.2)
    assert costs.came(500.0, 11)
    assert costs.estimate is not None
    assert costs.estimate.cost == pytest.approx(0.2)


def at_ten_a_second(costs: WriteCosts, since: float, version: int) -> None:
    """A second of updates that nothing holds up, the first of which is that `version`."""
    for number in range(11):
        costs.came(since + number / 10, version + number)


def test_what_a_failed_write_has_held_up_is_no_time_without_a_write() -> None:
    costs = WriteCosts()
    at_ten_a_second(costs, 0.0, 0)
    costs.begins(1.0)
    costs.fails()
    at_ten_a_second(costs, 5.0, 11)
    costs.begins(6.0)
    costs.ends(6.1)
    assert costs.came(6.1, 22)
    assert costs.estimate is not None
    assert costs.estimate.rate == pytest.approx(10.0)


AUTO = AutoInterval(least=10, most=1000, mtbf=None, begins_early=False)
OFTEN = FailureHistory(failures=10, exposure=105.0)  # one every 10 s


def test_the_interval_is_dalys_in_updates() -> None:
    every, mtbf = AUTO.choose(Estimate(rate=50.0, cost=0.2, during=2), OFTEN)
    assert mtbf == pytest.approx(10.0)
    assert every == math.ceil(50 * daly(0.2, 10.0)) == 94


@pytest.mark.parametrize(
    ("known", "history", "every"),
    [
        (Estimate(50.0, 0.0, 0), OFTEN, 10),
        (Estimate(50.0, 0.2, 2), FailureHistory(0, 1e9), 1000),
        (Estimate(50.0, 0.2, 2), FailureHistory(), 10),
        (Estimate(1e9, 1e9, 1e12), FailureHistory(0, 1e9), 1000),
        (Estimate(50.0, 0.0, 40.0), OFTEN, 50),  # a quarter more than come during a write
    ],
)
def test_the_interval_keeps_within_its_bounds(
    known: Estimate, history: FailureHistory, every: int
) -> None:
    assert AUTO.choose(known, history)[0] == every


def test_what_the_user_knows_of_failures_counts_until_more_is_seen() -> None:
    known = Estimate(rate=50.0, cost=0.2, during=2)
    told = AutoInterval(10, 1000, mtbf=10.0, begins_early=False)
    assert told.choose(known, FailureHistory())[0] == 94
    assert told.choose(known, FailureHistory(99, 99_990.0))[1] == pytest.approx(1000.0)


RATE, WRITE, LEAST, MOST = 40.0, 0.075, 10, 1000


def goodput(mtbf: float, seconds: float, seed: int, every: int | None) -> float:
    """Updates a second that are left in the end, of one shard whose acks wait for each write.

    Failures come at a constant rate; what was not saved is lost, and to restore takes no time.
    `every` is an interval in updates; None: it is chosen.
    """
    random = np.random.default_rng(seed)
    auto = AutoInterval(LEAST, MOST, None, begins_early=False)
    now, saved, failures = 0.0, 0.0, 0
    fails = random.exponential(mtbf)
    length = every or LEAST
    while now < seconds:
        end = now + length / RATE + WRITE
        if fails < end:
            now, failures = fails, failures + 1
            fails = now + random.exponential(mtbf)
            length = every or LEAST  # a new server has measured nothing
            continue
        now, saved = end, saved + length
        if every is None:
            history = FailureHistory(failures, now)
            length, _ = auto.choose(Estimate(RATE, WRITE, 1.0), history)
    return saved / now


@pytest.mark.parametrize("mtbf", [2.5, 20.0, 320.0])
def test_what_is_chosen_comes_within_five_percent_of_the_best_fixed_interval(mtbf: float) -> None:
    """Which is known only afterwards, and is another one for each rate of failures."""
    seconds, seeds = 40 * mtbf, range(20)
    means = {
        every: np.mean([goodput(mtbf, seconds, seed, every) for seed in seeds])
        for every in (25, 50, 100, 200, 400, None)
    }
    chosen = means.pop(None)
    assert chosen >= 0.95 * max(means.values())
    assert min(means.values()) < 0.95 * max(means.values()), "it matters which one is taken"
