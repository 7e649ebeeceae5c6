"""Expansion: what recurs becomes a plan of single faults that follows from the seed alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dps.core.faults.expansion import (
    Between,
    Drawn,
    Each,
    Entry,
    Flapping,
    Process,
    Recorded,
    Recurring,
    expand,
)
from dps.core.faults.plan import (
    After,
    Among,
    AtSeconds,
    AtUpdates,
    Corrupt,
    Fault,
    InChain,
    Kill,
    Pause,
    Seat,
)
from dps.errors import ConfigurationError

ANY = AtSeconds(0.0)


def moments(entry: Entry, seed: int = 0) -> list[float]:
    whens = [fault.when for fault in expand([entry], seed).plan]
    return [when.seconds for when in whens if isinstance(when, AtSeconds)]


def test_what_does_not_recur_stays_as_it_is() -> None:
    entries: list[Fault] = [Kill("server-0", AtUpdates(5)), Corrupt(0, After(0, 0.5))]
    expanded = expand(entries, seed=3)
    assert expanded.plan == tuple(entries)
    assert expanded.origins == (0, 1)


def test_a_random_process_follows_from_the_seed_and_its_place() -> None:
    often = Recurring(Pause("server-0", ANY, seconds=0.5), Process(mtbf=2, until=60))
    one, same, other = (moments(often, seed) for seed in (7, 7, 8))
    assert one == same != other
    plan = expand([often, often], seed=7).plan
    assert [fault.when for fault in plan[: len(one)]] != [f.when for f in plan[len(one) :]]
    assert one == sorted(one)
    assert all(0 < moment <= 60 for moment in one)
    assert all(fault.when.optional for fault in plan if isinstance(fault.when, AtSeconds))


def test_each_node_fails_by_itself_at_moments_that_follow_from_its_name() -> None:
    kills = tuple(Kill(Seat(name), ANY) for name in ("server-0", "server-1", "server-2"))
    process = Process(mtbf=2, until=60)
    plan = expand([Each(kills, process)], seed=7).plan
    of = {kill.target: [f.when for f in plan if f.target == kill.target] for kill in kills}
    assert len(set(map(tuple, of.values()))) == 3
    fewer = expand([Each(kills[1:], process)], seed=7).plan
    assert fewer == tuple(fault for fault in plan if fault.target != kills[0].target)
    assert not expand([Each((), process)], seed=7).plan


def test_what_an_entry_draws_is_the_same_whatever_stands_before_it() -> None:
    """To have more faults of one kind moves none of another."""
    drawn = Drawn(Kill("server-1", ANY), Between(10, 50))
    plans = [
        expand([Recurring(Corrupt(0, ANY), Process(mtbf, until=60)), drawn], seed=7).plan
        for mtbf in (2.0, 20.0)
    ]
    assert len(plans[0]) > len(plans[1])
    assert plans[0][-1] == plans[1][-1]


LAWS = [
    ("exponential", 1.0, stats.expon(scale=3.0)),
    ("weibull", 0.7, stats.weibull_min(0.7, scale=3.0 / stats.weibull_min(0.7).mean())),
    ("lognormal", 0.8, stats.lognorm(0.8, scale=3.0 / stats.lognorm(0.8).mean())),
]


@pytest.mark.parametrize(("distribution", "shape", "law"), LAWS)
def test_gaps_have_the_distribution_that_was_asked_for(
    distribution: str, shape: float, law: stats.rv_continuous
) -> None:
    process = Process(3.0, 1500.0, distribution, shape)  # type: ignore[arg-type]
    found = [0.0, *moments(Recurring(Corrupt(0, ANY), process), seed=1)]
    gaps = [b - a for a, b in pairwise(found)]
    assert law.mean() == pytest.approx(3.0)
    assert stats.kstest(gaps, law.cdf).pvalue > 0.01
    by_updates = Process(3e4, 1.5e7, distribution, shape, "updates")  # type: ignore[arg-type]
    plan = expand([Recurring(Corrupt(0, ANY), by_updates)], seed=1).plan
    updates = [0, *(f.when.updates for f in plan if isinstance(f.when, AtUpdates))]
    assert all(f.when.optional for f in plan if isinstance(f.when, AtUpdates))
    scaled = [(b - a) / 1e4 for a, b in pairwise(updates)]
    assert scaled == pytest.approx(gaps, abs=2e-4)  # the same draws, as whole numbers


@pytest.mark.parametrize("period", [7, 40, 100])
def test_every_phase_of_what_is_periodic_has_the_same_chance(period: int) -> None:
    """Over many seeds the moment, and its phase in a period that divides the range, is uniform."""
    low, high = 250, 250 + 3 * period
    entries = [Drawn(Kill("server-0", ANY), Between(low, high, "updates"))]
    whens = [expand(entries, seed).plan[0].when for seed in range(3000)]
    phases = np.bincount(
        [when.updates % period for when in whens if isinstance(when, AtUpdates)], minlength=period
    )
    assert phases.sum() == 3000
    assert stats.chisquare(phases).pvalue > 0.01
    timed = [Drawn(Pause("server-0", ANY), Between(1.0, 4.0))]
    seconds = [expand(timed, seed).plan[0].when for seed in range(3000)]
    found = [when.seconds % 1.0 for when in seconds if isinstance(when, AtSeconds)]
    assert stats.kstest(found, "uniform").pvalue > 0.01


FAULTS = st.sampled_from(
    [
        Kill("server-0", ANY, back_after=0.0),
        Kill(InChain(0), ANY, back_after=5.0),
        Kill(Among("random", "server"), ANY, back_after=30.0),
        Corrupt(1, ANY),
    ]
)


@given(seed=st.integers(0, 2**32), one=FAULTS, other=FAULTS, unit=st.sampled_from(["s", "u"]))
def test_draws_depend_on_the_seed_and_the_place_alone(
    seed: int, one: Fault, other: Fault, unit: str
) -> None:
    """Whom a fault hits, and for how long, draws no other moment."""
    whole = Between(200, 400, "updates") if unit == "u" else Between(1.5, 3.0)
    process = Process(50, 500, unit="updates" if unit == "u" else "seconds")
    of_one = expand([Drawn(one, whole), Recurring(one, process)], seed).plan
    of_other = expand([Drawn(other, whole), Recurring(other, process)], seed).plan
    assert of_one[0].when == of_other[0].when
    if isinstance(one.target, str) or isinstance(other.target, str):
        of_one, of_other = of_one[:1], of_other[:1]  # what one node may leave out: see below
    assert [f.when for f in of_one] == [f.when for f in of_other]


def test_what_is_down_already_does_not_fail_again() -> None:
    """An outage leaves moments out that lie within it, and moves none."""
    process = Process(2.0, 200.0)
    every = moments(Recurring(Kill("server-0", ANY, back_after=0.0), process))
    longer = moments(Recurring(Kill("server-0", ANY, back_after=3.0), process))
    expected: list[float] = []
    for moment in every:
        if not expected or moment - expected[-1] >= 3.0:
            expected.append(moment)
    assert longer == expected
    assert len(longer) < len(every)
    anybody = Kill(Among("random", "server"), ANY, back_after=3.0)  # another one may fail meanwhile
    assert moments(Recurring(anybody, process)) == every


def test_what_flaps_begins_at_a_drawn_moment() -> None:
    flap = Flapping(Pause("worker-0", ANY, seconds=0.5), times=3, up_seconds=1.0)
    first, *rest = expand([Drawn(flap, Between(5, 9, "updates"))], 4).plan
    assert isinstance(first.when, AtUpdates)
    assert 5 <= first.when.updates < 9
    assert [fault.when for fault in rest] == [After(0, 1.5), After(1, 1.5)]


@pytest.mark.parametrize(
    ("low", "high", "unit"),
    [
        (0, 5, "updates"),
        (5, 5, "updates"),
        (1, 2.5, "updates"),
        (-1, 5, "seconds"),
        (3, 2, "seconds"),
    ],
)
def test_a_wrong_range_is_refused(low: float, high: float, unit: str) -> None:
    with pytest.raises(ConfigurationError, match=f"between {low} and {high} {unit}: expected"):
        Between(low, high, unit)  # type: ignore[arg-type]


def test_what_recurs_hits_whoever_has_the_place() -> None:
    process = Process(1, 30)
    for fault in expand([Recurring(Kill("worker-1", ANY), process)], 0).plan:
        assert fault.target == Seat("worker-1")
    for target in (InChain(0), Among("random"), ("server-0", "server-1")):
        for fault in expand([Recurring(Kill(target, ANY), process)], 0).plan:
            assert fault.target == target


def test_too_many_faults_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="corrupt of shard 1: more than 1000 faults"):
        expand([Recurring(Corrupt(1, ANY), Process(1e-3, 60))], 0)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ((0.0, 1.0), "mtbf=0.0"),
        ((1.0, -1.0), "until=-1.0"),
        ((1.0, 1.0, "weibull", 0.0), "shape=0.0"),
        ((1.0, 1.0, "normal"), "distribution='normal'"),
        ((1.0, 1.0, "lognormal", 11.0), "shape=11.0 of a lognormal distribution"),
    ],
)
def test_a_wrong_process_is_refused(settings: tuple[float, float], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Process(*settings)


def test_flapping_is_one_fault_after_the_other_and_references_are_kept() -> None:
    flap = Flapping(Kill("server-0", After(2), back_after=0.5), times=3, up_seconds=1.0)
    fault = Pause("server-1", AtUpdates(5))
    entries = [flap, Corrupt(0, After(0, 0.1)), fault, Recorded((Kill("worker-0", ANY),))]
    expanded = expand(entries, 0)
    seat = Seat("server-0")
    assert expanded.plan == (
        Kill(seat, After(4), 0.5),
        Kill(seat, After(0, 1.5), 0.5),
        Kill(seat, After(1, 1.5), 0.5),
        Corrupt(0, After(0, 0.1)),
        fault,
        replace(Kill("worker-0", ANY), target=Seat("worker-0")),
    )
    assert expanded.origins == (0, 0, 0, 1, 2, 3)
