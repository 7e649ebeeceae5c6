"""Expansion: what recurs becomes a plan of single faults that follows from the seed alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest

from dps.core.faults.expansion import Entry, Flapping, Process, Recorded, Recurring, expand
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


@pytest.mark.parametrize(("distribution", "shape"), [("exponential", 1.0), ("weibull", 0.7)])
def test_gaps_have_the_mean_that_was_asked_for(distribution: str, shape: float) -> None:
    process = Process(3.0, 1500.0, distribution, shape)  # type: ignore[arg-type]
    found = moments(Recurring(Pause("server-0", ANY, seconds=1.0), process))
    gaps = [b - a - 1.0 for a, b in pairwise(found)]  # from end to start
    assert min(gaps) > 0
    assert fmean(gaps) == pytest.approx(3.0, rel=0.2)


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
