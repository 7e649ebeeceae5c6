"""Expansion: what recurs becomes a plan of single faults that follows from the seed alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from dps.errors import ConfigurationError
from dps.faults import (
    After,
    Among,
    AtSeconds,
    AtUpdates,
    Between,
    Corrupt,
    Every,
    InChain,
    Kill,
    Pause,
    Seat,
)
from dps.faults.expansion import Entry, expand

ANY = AtSeconds(0.0)


def moments(*entries: Entry, seed: int = 0) -> list[float]:
    whens = [fault.when for fault in expand(entries, seed)]
    return [when.seconds for when in whens if isinstance(when, AtSeconds)]


def test_a_random_process_follows_from_the_seed_and_its_place() -> None:
    often = Pause("server-0", Every(mtbf=2, until=60), seconds=0.5)
    one, same, other = (moments(often, seed=seed) for seed in (7, 7, 8))
    assert one == same != other
    plan = expand([often, often], seed=7)
    assert [fault.when for fault in plan[: len(one)]] != [f.when for f in plan[len(one) :]]
    assert one == sorted(one)
    assert all(0 < moment <= 60 for moment in one)
    assert all(fault.when.optional for fault in plan)


def test_each_node_fails_by_itself_at_moments_that_follow_from_its_name() -> None:
    names = ("server-0", "server-1", "server-2", "worker-0")
    each = Kill(Among("each", "server"), Every(mtbf=2, until=60))
    plan = expand([each], 7, names)
    of = {name: [f.when for f in plan if f.target == Seat(name)] for name in names[:3]}
    assert sum(map(len, of.values())) == len(plan)
    assert len(set(map(tuple, of.values()))) == 3
    fewer = expand([each], 7, names[1:])
    assert fewer == tuple(fault for fault in plan if fault.target != Seat(names[0]))
    assert not expand([each], 7, names[3:])


def test_what_an_entry_draws_is_the_same_whatever_stands_before_it() -> None:
    """To have more faults of one kind moves none of another."""
    drawn = Kill("server-1", Between(10, 50))
    before = [Corrupt(0, Every(mtbf=mtbf, until=60)) for mtbf in (2.0, 20.0)]
    plans = [expand([each, drawn], seed=7) for each in before]
    assert len(plans[0]) > len(plans[1])
    assert plans[0][-1] == plans[1][-1]


LAWS = [
    (1.0, stats.expon(scale=3.0)),
    (0.7, stats.weibull_min(0.7, scale=3.0 / stats.weibull_min(0.7).mean())),
]


@pytest.mark.parametrize(("shape", "law"), LAWS)
def test_gaps_have_the_distribution_that_was_asked_for(
    shape: float, law: stats.rv_continuous
) -> None:
    every = Every(mtbf=3.0, until=1500.0, shape=shape)
    gaps = [b - a for a, b in pairwise([0.0, *moments(Corrupt(0, every), seed=1)])]
    assert law.mean() == pytest.approx(3.0)
    assert stats.kstest(gaps, law.cdf).pvalue > 0.01
    every = Every(updates=3e4, until=1.5e7, shape=shape)
    plan = expand([Corrupt(0, every)], seed=1)
    updates = [0, *(f.when.updates for f in plan if isinstance(f.when, AtUpdates))]
    scaled = [(b - a) / 1e4 for a, b in pairwise(updates)]
    assert scaled == pytest.approx(gaps, abs=2e-4)  # the same draws, as whole numbers


@pytest.mark.parametrize("period", [7])
def test_every_phase_of_what_is_periodic_has_the_same_chance(period: int) -> None:
    """Over many seeds the moment, and its phase in a period that divides the range, is uniform."""
    low, high = 250, 250 + 3 * period
    entries = [Kill("server-0", Between(low, high, "updates"))]
    whens = [expand(entries, seed)[0].when for seed in range(3000)]
    phases = np.bincount(
        [when.updates % period for when in whens if isinstance(when, AtUpdates)], minlength=period
    )
    assert phases.sum() == 3000
    assert stats.chisquare(phases).pvalue > 0.01
    timed = [moments(Pause("server-0", Between(1.0, 4.0)), seed=seed)[0] for seed in range(3000)]
    assert stats.kstest([each % 1.0 for each in timed], "uniform").pvalue > 0.01


def test_what_is_down_already_does_not_fail_again() -> None:
    """An outage leaves moments out that lie within it, and moves none."""
    every = Every(mtbf=2.0, until=200.0)
    short = moments(Kill("server-0", every, back_after=0.0))
    longer = moments(Kill("server-0", every, back_after=3.0))
    expected: list[float] = []
    for moment in short:
        if not expected or moment - expected[-1] >= 3.0:
            expected.append(moment)
    assert longer == expected
    assert len(longer) < len(short)
    another = Kill(Among("random", "server"), every, back_after=3.0)  # may fail meanwhile
    assert moments(another) == short


def test_what_recurs_hits_the_node_that_has_the_place() -> None:
    every = Every(mtbf=1, until=30)
    assert {f.target for f in expand([Kill("w-1", every)], 0)} == {Seat("w-1")}
    for target in (InChain(0), Among("random"), ("server-0", "server-1")):
        assert {f.target for f in expand([Kill(target, every)], 0)} == {target}


def test_too_many_faults_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="corrupt of shard 1: more than 1000 faults"):
        expand([Corrupt(1, Every(mtbf=1e-3, until=60))], 0)


def test_an_entry_after_another_comes_after_the_first_of_its_faults() -> None:
    often = Kill("server-1", Every(mtbf=2, until=9))
    trace = (Kill("worker-0", ANY), Kill("worker-1", ANY))
    *kills, one, two, last = expand([often, trace, Corrupt(0, After(1, 0.1))], 0)
    assert len(kills) > 1
    assert (one, two) == (Kill(Seat("worker-0"), ANY), Kill(Seat("worker-1"), ANY))
    assert last == Corrupt(0, After(len(kills), 0.1))
