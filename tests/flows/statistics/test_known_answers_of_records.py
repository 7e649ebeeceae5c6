"""Planted effects through the whole chain: records, their effects against controls, claims.

Each experiment is simulated: six seeds of two strategies, each with a fault and without. A seed has
a course of learning of its own, which all its trials share, and from the fault on the accuracy is
off by what was planted, give or take something drawn for each trial. 1,000 experiments for each
case, so that shares are told as in `test_known_answers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dps.events import Disturbed, Evaluated, Event, NodeJoined
from flows.config.claims import ClaimSection
from flows.metrics.outcome import Outcome
from flows.records.events import TrainingStarted, TrialEnded, TrialStarted
from flows.records.record import Record
from flows.statistics.claims import JudgedClaim, judge
from flows.statistics.decisions import more
from flows.statistics.finished import Finished, finished, with_effects
from flows.statistics.power import power_of_claim
from tests.support.records import PRICES, acked, applied

pytestmark = [pytest.mark.slow]

REPETITIONS, SEEDS = 1_000, 6
MAX_WRONG = 0.066  # as in `test_known_answers`
SMALLEST, SD = 0.015, 0.008  # of the effect of a fault on one trial
START, STRUCK, END = 1000.0, 10.0, 40.0
FAULT = {"kind": "delay", "target": "server-0", "at_seconds": STRUCK}
ALIKE, APART = (0.0, 0.0), (-SMALLEST, 0.0)  # what is planted in checkpoint and in chain


# -- simulated records ---------------------------------------------------------------------------


def record(
    strategy: str, seed: int, learnt: Callable[[float], float], effect: float | None
) -> Record:
    """A training that is scored every 5 s; from the fault on, if there is one, off by `effect`."""
    faults = [] if effect is None else [FAULT]
    name = f"{strategy}.{'fault' if faults else 'quiet'}.seed-{seed}"
    labels = {"recovery": strategy, "faults": "fault" if faults else "quiet"}
    config = {"experiment": "planted", "recovery": strategy, "seed": seed, "faults": faults}
    settings = {"trial": name, "experiment": "planted", "seed": seed, "digest": "d"}
    opening = TrialStarted(START - 5, name, {**settings, "labels": labels, "config": config}, {})
    return Record((opening, *_training(learnt, effect), TrialEnded(START + END + 1, "valid", "")))


def _training(learnt: Callable[[float], float], effect: float | None) -> Iterator[Event]:
    yield NodeJoined(START - 1, "server-0", "server", 1, "here")
    yield NodeJoined(START - 1, "worker-0", "worker", 2, "here")
    yield TrainingStarted(START, 1, 1, 10)
    for pushed, seconds in enumerate(np.arange(0.0, END + 1, 5.0)):
        t = START + float(seconds)
        if effect is None or seconds <= STRUCK:
            yield Evaluated(t, pushed, 1.0, learnt(seconds))
        if effect is not None and seconds == STRUCK:
            yield Disturbed(t, 0, "delay", "server-0", pushed, "seen", True)
        if effect is not None and seconds >= STRUCK:
            yield Evaluated(t, pushed, 1.0, learnt(seconds) + effect)
        yield acked([pushed + 1], t=t)
        yield applied([pushed + 1], t=t)


def course(rng: np.random.Generator) -> Callable[[float], float]:
    """How a seed learns: it differs between seeds by more than any effect."""
    best, pace = rng.normal(0.8, 0.05), rng.uniform(8, 15)
    return lambda seconds: float(best * (1 - 0.9 * math.exp(-seconds / pace)))


def experiment(rng: np.random.Generator, planted: tuple[float, float]) -> list[Outcome]:
    done: list[Finished] = []
    for seed in range(SEEDS):
        learnt = course(rng)
        for strategy, mean in zip(("checkpoint", "chain"), planted, strict=True):
            for effect in (None, rng.normal(mean, SD)):
                made = record(strategy, seed, learnt, effect)
                done.append(finished(Path(f"{strategy}-{seed}"), made, PRICES))
    return [each.outcome for each in with_effects(done, PRICES)]


# -- claims --------------------------------------------------------------------------------------


def claim(direction: str, strategy: str = "chain", against: str = "checkpoint") -> ClaimSection:
    return ClaimSection.model_validate(
        {
            "metric": "effect_time_mean",
            "strategy": strategy,
            "against": against,
            "condition": {"faults": "fault"},
            "direction": direction,
            "smallest": SMALLEST,
        }
    )


CLAIMS = {
    "more": claim("more"),
    "less": claim("less"),
    "equivalent": claim("equivalent"),
    "set back": claim("less", "checkpoint", "none-given"),
}


@cache
def judged(planted: tuple[float, float]) -> dict[str, list[JudgedClaim]]:
    """Each claim as it is judged by itself, of all experiments."""
    rng = np.random.default_rng(2026)
    found: dict[str, list[JudgedClaim]] = {name: [] for name in CLAIMS}
    for _ in range(REPETITIONS):
        outcomes = experiment(rng, planted)
        for name, each in CLAIMS.items():
            found[name] += judge(outcomes, [each], rng)
    return found


def share(planted: tuple[float, float], name: str, verdict: str) -> float:
    return sum(j.decision.verdict == verdict for j in judged(planted)[name]) / REPETITIONS


def test_where_nothing_is_planted_few_claims_are_found_to_hold() -> None:
    assert share(ALIKE, "more", "holds") + share(ALIKE, "less", "holds") <= MAX_WRONG
    assert share(ALIKE, "set back", "holds") <= MAX_WRONG / 2 + 0.01


def test_the_smallest_effect_of_interest_is_seldom_said_not_to_be() -> None:
    assert share(APART, "more", "does not hold") <= MAX_WRONG
    assert share(APART, "set back", "does not hold") <= MAX_WRONG
    assert share(APART, "equivalent", "holds") <= MAX_WRONG


@pytest.mark.parametrize(("name", "sd"), [("more", SD * math.sqrt(2)), ("set back", SD)])
def test_it_is_found_as_often_as_is_planned(name: str, sd: float) -> None:
    predicted = power_of_claim(more(SMALLEST), SEEDS, sd, SMALLEST)
    assert share(APART, name, "holds") == pytest.approx(predicted, abs=0.03)


@pytest.mark.parametrize("planted", [ALIKE, APART])
def test_intervals_cover_what_was_planted(planted: tuple[float, float]) -> None:
    for name, mean in (("more", planted[1] - planted[0]), ("set back", planted[0])):
        found = [j.difference for j in judged(planted)[name]]
        bounds = [each.bounds() for each in found if each is not None]
        covered = sum(b is not None and b[0] <= mean <= b[1] for b in bounds) / REPETITIONS
        assert 0.93 <= covered <= 0.97
