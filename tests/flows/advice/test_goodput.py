"""The renewal-reward estimate, against closed forms and against failures that are really drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flows.advice.goodput import Setbacks, goodput, lost_share, twice_within, until_whole

HOUR = 3600.0


def test_without_setbacks_the_pace_is_kept() -> None:
    nothing = Setbacks(0.8, {"server": 2}, {"server": 0.0})
    assert goodput(nothing, HOUR, 24 * HOUR) == 0.8


def test_a_setback_as_long_as_the_time_between_failures_takes_half() -> None:
    setbacks = Setbacks(1.0, {"server": 4}, {"server": HOUR / 4})
    assert lost_share(setbacks, HOUR) == pytest.approx(1.0)
    assert goodput(setbacks, HOUR, HOUR) == pytest.approx(0.5)


def test_more_nodes_fail_more_often_and_each_role_costs_what_it_costs() -> None:
    setbacks = Setbacks(1.0, {"server": 2, "spare": 1}, {"server": 30.0, "spare": 6.0})
    assert lost_share(setbacks, 660.0) == pytest.approx((2 * 30 + 6) / 660)


def test_the_estimate_is_what_drawn_failures_leave() -> None:
    """Failures of a Poisson process; within a setback there is none, as the estimate assumes."""
    rng, mtbf, nodes = np.random.default_rng(0), 900.0, 3
    setbacks = rng.exponential(40.0, 200_000)  # only their mean may matter
    between = rng.exponential(mtbf / nodes, len(setbacks))
    drawn = between.sum() / (between.sum() + setbacks.sum())
    told = goodput(Setbacks(1.0, {"server": nodes}, {"server": 40.0}), mtbf, HOUR)
    assert told == pytest.approx(drawn, rel=2e-3)


def test_failures_within_a_setback_make_it_no_worse_than_told_where_setbacks_are_short() -> None:
    """Without the assumption: failures also come during setbacks, which then begin anew."""
    rng, mtbf, setback, end = np.random.default_rng(1), 500.0, 5.0, 2e6
    moments = np.cumsum(rng.exponential(mtbf, int(end / mtbf)))
    lost = np.minimum(np.diff(moments), setback).sum() + setback
    told = goodput(Setbacks(1.0, {"server": 1}, {"server": setback}), mtbf, HOUR)
    assert told == pytest.approx(1 - lost / moments[-1], abs=1e-3)


def test_beginning_again_takes_as_long_as_drawn_failures_have_it() -> None:
    rng, work, mtbf, down = np.random.default_rng(2), 2.0, 1.5, 0.25

    def once() -> float:
        spent = 0.0
        while (failure := rng.exponential(mtbf)) < work:
            spent += failure + down
        return spent + work

    times = [once() for _ in range(20_000)]
    error = 3 * float(np.std(times)) / math.sqrt(len(times))
    assert until_whole(work, 1 / mtbf, down) == pytest.approx(np.mean(times), abs=error)


def test_a_training_that_never_ends_keeps_nothing() -> None:
    assert until_whole(1e6, 1.0, 0.0) == math.inf
    hopeless = Setbacks(1.0, {"server": 1}, {"server": 0.0}, fatal=1.0)
    assert goodput(hopeless, 1.0, 1e6) == 0.0


def test_a_fatal_failure_that_is_rare_takes_half_a_training_each() -> None:
    """To the first order λW/2 of the work is lost: a failure comes midway on the average."""
    rare = Setbacks(1.0, {"server": 1}, {"server": 0.0}, fatal=1e-6)
    assert goodput(rare, 1.0, 1000.0) == pytest.approx(1 - 1e-6 * 1000 / 2, rel=1e-6)


def test_pairs_are_lost_as_often_as_drawn() -> None:
    rng, mtbf, window = np.random.default_rng(3), 100.0, 5.0
    first, second = (np.cumsum(rng.exponential(mtbf, 400_000)) for _ in range(2))
    end = min(first[-1], second[-1])
    both = 0
    for one, other in ((first, second), (second, first)):
        own = one[one < end - window]
        after = np.searchsorted(other, own)
        both += int((other[after] - own < window).sum())
    assert twice_within(1, mtbf, window) == pytest.approx(both / end, rel=0.02)
