"""What is made of trials: costs of strategies whose setbacks are known, flips, and what is said."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from dps.core.checkpoint_interval import Estimate
from dps.errors import ConfigurationError
from flows.advice.emulation import layout, scaled
from flows.advice.estimate import cheapest, expected, flips
from flows.advice.situation import STRATEGIES, Situation
from flows.advice.text import as_data, recommendation, warnings
from flows.advice.trials import Strikes, Trialled
from flows.config.profile import load_profile

HOUR = 3600.0
SITUATION = Situation(
    nbytes=40_000_000,
    workers=4,
    servers=2,
    gradient=0.2,
    mtbf=6 * HOUR,
    outage=60.0,
    training=24 * HOUR,
    server_price=0.5,
    worker_price=2.0,
    profile=load_profile("cluster-25gbit").build(),
)
RATE = 20.0
NONE, CHECKPOINT, SPARE, CHAIN, *_ = STRATEGIES


def strikes(seconds: float, lost: float = 0.0, down: float = 0.0) -> Strikes:
    spread = (seconds - 1, seconds, seconds + 1)
    return Strikes(spread, (lost,) * 3, (0.0,) * 3, (down,) * 3)


def trialled() -> list[Trialled]:
    write = Estimate(RATE, 0.0, 0.06 * RATE)
    rows = [
        (NONE, 4, RATE, None, {"server": strikes(64.0, 40.0, 61.0)}),
        (CHECKPOINT, 10, RATE, write, {"server": strikes(62.0, 5.0, 61.0)}),
        (SPARE, 10, RATE, write, {"server": strikes(2.0, 5.0, 1.0), "spare": strikes(0.0)}),
        (CHAIN, 4, RATE * 0.9, None, {"server": strikes(0.5), "replica": strikes(0.2)}),
    ]
    return [
        Trialled(strategy, layout(SITUATION, strategy), every, rate, 0.1, write, struck)
        for strategy, every, rate, write, struck in rows
    ]


def test_a_strategy_has_the_nodes_that_its_configuration_says() -> None:
    nodes = {s.label: layout(SITUATION, s).nodes for s in STRATEGIES}
    assert nodes["none"] == nodes["checkpoint"] == nodes["worker_cache"] == {"server": 2}
    assert nodes["checkpoint + spare"] == {"server": 2, "spare": 1}
    assert nodes["chain(2)"] == nodes["chain(2) + continue"] == {"server": 2, "replica": 2}
    assert nodes["stateless"] == nodes["stateless + checkpoint"] == {"server": 2, "store": 1}
    assert nodes["chain(2) + checkpoint"] == nodes["chain(2)"]


def test_checkpoints_below_are_gone_back_to_when_both_nodes_of_a_pair_are_lost() -> None:
    layered = next(s for s in STRATEGIES if s.label == "chain(2) + checkpoint")
    assert layered.section(40) == {"preset": "chain", "durability": {"below": {"every": 40}}}
    *_, chain = trialled()
    write = Estimate(RATE, 0.0, 1.5)
    below = replace(chain, strategy=layered, every=10, write=write)
    often = replace(SITUATION, mtbf=1200.0)
    none, alone, found = expected(often, [trialled()[0], chain, below])
    assert (found.extra, found.pace, found.layered) == (alone.extra, alone.pace, True)
    assert alone.kept < 0.01
    again, every = 60 + SITUATION.profile.start, found.every
    assert every is not None
    pairs = 2 * 2 / 1200 * (1 - math.exp(-again / 1200))
    lost = every / 4 + write.during
    read = SITUATION.profile.disk.seconds(20_000_000)
    delay = (2 * 0.5 + 2 * 0.2) / 1200 + pairs * (again + read + lost / (0.9 * RATE))
    assert found.lost_time == pytest.approx(delay)
    assert found.kept == pytest.approx(0.9 / (1 + delay))
    assert found.at_risk == pytest.approx(pairs * lost / (4 / 1200))
    assert found.fatal == math.inf
    turns = flips(often, [trialled()[0], below])
    said = recommendation(often, [none, found], turns)
    assert said.startswith("Use chain(2) + checkpoint, written every ")
    assert "auto" not in said


def test_kept_and_cost_follow_from_setbacks_by_hand() -> None:
    _, checkpoint, spare, chain = expected(SITUATION, trialled())
    assert checkpoint.every == 10
    assert checkpoint.kept == pytest.approx(1 / (1 + 2 * 62 / (6 * HOUR)))
    assert checkpoint.usd == pytest.approx(
        (2 * 0.5 + 4 * 2) / HOUR / (RATE * checkpoint.kept) * 1e6
    )
    assert spare.setback == pytest.approx((2 * 2.0 + 0) / 3)
    assert spare.at_risk == pytest.approx(5 * 2 / 3)
    assert (spare.extra, chain.extra) == (1, 2)
    assert chain.pace == pytest.approx(0.9)
    # Two pairs, either of which may lose one node and the other within the outage.
    again = 60 + SITUATION.profile.start
    assert chain.fatal == pytest.approx((6 * HOUR) ** 2 / (2 * 2 * again), rel=0.01)


def test_without_recovery_the_training_begins_again() -> None:
    none = expected(SITUATION, trialled())[0]
    rate, again = 2 / (6 * HOUR), 60 + SITUATION.profile.start
    whole = (1 / rate + again) * math.expm1(rate * 24 * HOUR)
    assert none.kept == pytest.approx(24 * HOUR / whole)
    assert none.at_risk == none.setback == math.inf


def test_a_longer_outage_costs_those_who_wait_for_the_node_and_no_others() -> None:
    longer = replace(SITUATION, outage=90.0)
    _, checkpoint, spare, _ = expected(longer, trialled())
    assert checkpoint.setback == pytest.approx(62 + 30)
    assert spare.setback == pytest.approx(4 / 3)


def test_rare_failures_stretch_an_interval_whose_writes_cost_something() -> None:
    some = trialled()
    some[1] = replace(some[1], write=Estimate(RATE, 0.05, 0.06 * RATE))
    often, seldom = (expected(SITUATION, some, mtbf)[1].every for mtbf in (HOUR, 100 * HOUR))
    assert often is not None
    assert seldom is not None
    assert 5 * often < seldom < 20 * often


def test_where_it_flips_both_cost_the_same() -> None:
    some = trialled()
    best = cheapest(expected(SITUATION, some))
    below, _ = flips(SITUATION, some)
    assert below is not None
    assert below.mtbf < SITUATION.mtbf
    assert below.label != best.label
    there = {e.label: e.usd for e in expected(SITUATION, some, below.mtbf)}
    assert there[best.label] == pytest.approx(there[below.label], rel=3e-3)


def test_the_sentence_names_the_strategy_and_where_it_flips() -> None:
    some = trialled()
    found, turns = expected(SITUATION, some), flips(SITUATION, some)
    said = recommendation(SITUATION, found, turns)
    assert said.startswith(f"Use {cheapest(found).label}")
    assert "below an MTBF of" in said


def test_what_is_no_exception_is_told() -> None:
    often = replace(SITUATION, mtbf=600.0)
    said = "\n".join(warnings(often, expected(often, trialled()), 0.9))
    assert "The servers are the bottleneck: workers wait for 90% of their time" in said
    assert "checkpoint: failures set it back by 21% of the time between them" in said


def test_json_has_null_for_what_has_no_end() -> None:
    found, turns = expected(SITUATION, trialled()), flips(SITUATION, trialled())
    data = json.loads(json.dumps(as_data(SITUATION, found, turns, RATE, []), allow_nan=False))
    assert [s["label"] for s in data["strategies"]] == [s.label for s in STRATEGIES[:4]]
    assert data["strategies"][0]["at_risk"] is None
    assert data["situation"]["mtbf"] == 6 * HOUR
    assert data["cheapest"] in data["recommendation"]


def test_a_byte_of_a_scaled_profile_takes_as_long_as_many() -> None:
    profile = SITUATION.profile
    small = scaled(profile, 100.0)
    assert small.disk.seconds(1000) == pytest.approx(profile.disk.seconds(100_000))
    assert small.link.latency == profile.link.latency
    assert 1000 / small.link.bandwidth == pytest.approx(100_000 / profile.link.bandwidth)
    assert 1000 * small.service.update == pytest.approx(100_000 * profile.service.update)


def test_servers_that_could_not_answer_in_time_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"deadline of 5 s.*more --servers"):
        replace(SITUATION, nbytes=40_000_000_000).check()
    SITUATION.check()
