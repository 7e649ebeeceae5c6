"""Claims of an experiment: what they are judged by, what is said of them, and since when."""

from __future__ import annotations

import dataclasses
import io
from itertools import count

import numpy as np
import pytest
from rich.console import Console

from flows.config.claims import ClaimSection
from flows.metrics.effects import Effects
from flows.metrics.outcome import Outcome, outcome
from flows.metrics.prices import load_prices
from flows.records.record import Record
from flows.report.claims import verdict_sentence, warnings
from flows.report.terminal import print_plan
from flows.statistics.claims import JudgedClaim, fixed, judge, planned
from flows.statistics.decisions import more
from flows.statistics.power import power_of_claim
from tests.support.records import with_values
from tests.support.synthetic import missed, toy_events

PRICES = load_prices()
TOY = {s: outcome(Record(tuple(toy_events(s, "kill", 0))), PRICES) for s in ("none", "chain")}


def claim(**changes: object) -> ClaimSection:
    given = {
        "metric": "accuracy_final",
        "strategy": "chain",
        "against": "none",
        "condition": {"faults": "kill"},
        "direction": "more",
        "smallest": 0.01,
    }
    return ClaimSection.model_validate({**given, **changes})


def trials(
    chain: list[float], none: list[float] | None = None, lost: tuple[int, ...] = ()
) -> list[Outcome]:
    """Trials of two strategies with these final accuracies, and updates that chain lost."""
    values = {"chain": chain, "none": [0.8] * len(chain) if none is None else none}
    found = []
    for strategy, finals in values.items():
        for seed, final in enumerate(finals):
            toy = TOY[strategy]
            identity = dataclasses.replace(toy.identity, seed=seed)
            each = with_values(dataclasses.replace(toy, identity=identity), accuracy_final=final)
            if strategy == "chain" and lost:
                each = with_values(each, updates_lost=lost[seed])
            found.append(each)
    return found


def one(outcomes: list[Outcome], *claims: ClaimSection) -> JudgedClaim:
    return judge(outcomes, claims, np.random.default_rng(0))[0]


# Mean 0.85 and standard error 0.01 over four seeds; Student's interval reaches 3.182 of them.
FOUR = [0.85 - 0.01 * 6**0.5, 0.85, 0.85, 0.85 + 0.01 * 6**0.5]


def test_a_claim_is_told_as_a_sentence_with_effect_interval_and_verdict() -> None:
    assert verdict_sentence(one(trials(FOUR), claim())) == (
        "+5.0 points [1.8, 8.2], 4 seeds, p = 0.015: holds (by 1 point or more)."
    )
    assert "holds (whether by 4 points or more is open)" in verdict_sentence(
        one(trials(FOUR), claim(smallest=0.04))
    )
    assert verdict_sentence(one(trials(FOUR), claim(direction="less"))).endswith(
        "p = 0.009: does not hold (the difference goes the other way)."
    )
    small = [0.8 + (each - 0.85) / 10 for each in FOUR]
    assert verdict_sentence(one(trials(small), claim())).endswith(
        "does not hold (the difference is less than 1 point, if there is any)."
    )


def test_a_figure_that_is_a_difference_itself_is_compared_with_0() -> None:
    alone = claim(metric="accuracy_final", against="none-given", smallest=0.5)
    found = one(trials(FOUR), alone)
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(0.85)
    assert "85.0 points [81.8, 88.2]" in verdict_sentence(found)


def test_a_strategy_is_compared_with_itself_under_another_condition() -> None:
    """Seed by seed, as with another strategy."""
    few, many = (
        [
            dataclasses.replace(
                each,
                identity=dataclasses.replace(
                    each.identity, labels={**each.identity.labels, "workers": workers}
                ),
            )
            for each in trials(finals)
        ]
        for workers, finals in (("2", [0.8] * 4), ("8", FOUR))
    )
    condition = {"faults": "kill", "workers": "8"}
    found = one([*few, *many], claim(against={"workers": "2"}, condition=condition))
    assert found.trials == 8
    assert verdict_sentence(found) == (
        "+5.0 points [1.8, 8.2], 4 seeds, p = 0.015: holds (by 1 point or more)."
    )


def test_all_claims_count_for_the_correction_of_each() -> None:
    other = claim(metric="updates_lost", strategy="chain", direction="less", smallest=50)
    alone, among = one(trials(FOUR), claim()), one(trials(FOUR), claim(), other, claim(smallest=9))
    assert (alone.decision.verdict, among.decision.verdict) == ("holds", "holds")
    assert among.decision.corrected == pytest.approx(3 * (among.decision.p or 0))
    assert " at 98.3%], 4 seeds, corrected p = 0.046: holds" in verdict_sentence(among)


def test_the_seeds_that_it_takes_are_those_at_the_level_of_all_claims() -> None:
    def at_level(level: float) -> int:
        region = more(0.01)
        powers = (power_of_claim(region, n, sd, 0.01, level) for n in count(3))
        return next(n for n, power in enumerate(powers, 3) if power >= 0.8)

    sd = float(np.std(FOUR, ddof=1))
    three = claim(), claim(smallest=0.02), claim(direction="less")
    rng = np.random.default_rng(0)
    for claims, level in (((claim(),), 0.05), (three, 0.05 / 3)):
        assert one(trials(FOUR), *claims).needed == at_level(level)
        plan = planned(claims, 10, trials(FOUR), rng)[0]
        assert plan.needed == at_level(level)
        assert plan.power == power_of_claim(more(0.01), 10, sd, 0.01, level)


def test_a_claim_names_the_trials_whose_seed_does_not_count_and_why() -> None:
    """A resumed trial keeps its final accuracy, and loses what is of the whole training."""
    each = trials(FOUR)
    each[0] = dataclasses.replace(each[0], whole=False)
    each[5] = dataclasses.replace(each[5], status="invalid", reason="the machine was too busy")
    final, seconds = one(each, claim()), one(each, claim(metric="training_seconds", smallest=1))
    assert final.difference is not None
    assert (final.difference.n, len(final.unusable)) == (3, 1)
    assert seconds.difference is not None
    assert seconds.difference.n == 2
    names = [outcome.identity.trial for outcome in (each[0], each[5])]
    assert warnings(seconds)[0] == (
        f"trials that do not count: {names[0]} (it was resumed), {names[1]} (it is invalid)"
    )


@pytest.mark.parametrize("why", ["its control none.no-fault.seed-0 was resumed", ""])
def test_a_seed_whose_effect_is_unknown_is_lost_and_the_others_are_judged(why: str) -> None:
    known = Effects("quiet", values={"effect_time_mean": 0.05})
    each = [
        dataclasses.replace(outcome, effects=Effects(lacking=why) if seed == 0 else known)
        for seed, outcome in enumerate(trials([0.8] * 4)[:4])
    ]
    against_0 = claim(metric="effect_time_mean", against="none-given")
    judged = one(each, against_0)
    assert judged.uneven is None
    assert judged.difference is not None
    assert judged.difference.n == 3
    assert judged.unusable[0].endswith(f"({why or 'it has no control'})")


def test_only_valid_trials_of_the_condition_enter() -> None:
    bad = outcome(Record(tuple(missed(toy_events("chain", "kill", 0)))), PRICES)
    rest = [o for o in trials(FOUR) if (o.identity.strategy, o.identity.seed) != ("chain", 0)]
    found = one([bad, *rest], claim())
    assert (found.difference and found.difference.n, found.trials) == (3, 6)
    assert one(trials(FOUR), claim(condition={"faults": "no fault"})).difference is None


def test_what_only_some_seeds_reach_is_not_judged_by_those() -> None:
    some = trials([0.8] * 4)
    lacking = [
        with_values(o, accuracy_final=None)
        if (o.identity.strategy, o.identity.seed) == ("chain", 2)
        else o
        for o in some
    ]
    found = one(lacking, claim())
    assert found.decision.verdict == "not resolved"
    assert verdict_sentence(found) == (
        "Not resolved (not comparable: a value in 3 of 4 seeds against 4 of 4)."
    )


# -- fixed beforehand ----------------------------------------------------------------------------


def begun_with(claims: list[ClaimSection], seeds: int, outcomes: list[Outcome]) -> list[Outcome]:
    return [dataclasses.replace(o, circumstances=fixed(claims, seeds)) for o in outcomes]


def test_a_claim_that_was_there_when_its_trials_began_was_fixed_beforehand() -> None:
    known = begun_with([claim()], 4, trials(FOUR))
    assert warnings(one(known, claim())) == ()
    reworded = claim(claim="A chain ends higher")
    assert warnings(one(known, reworded)) == (), "the words are not what is claimed"


@pytest.mark.parametrize("changes", [{"smallest": 0.02}, {"direction": "less"}])
def test_a_claim_that_was_changed_or_added_later_says_so(changes: dict[str, object]) -> None:
    known = begun_with([claim()], 4, trials(FOUR))
    late = one([*known[:6], *begun_with([claim(**changes)], 4, known[6:])], claim(**changes))
    assert warnings(late) == ("fixed after the data: 6 of 8 trials began before",)


# -- on the terminal -----------------------------------------------------------------------------


def printed(show: object, *arguments: object) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    show(*arguments, console)  # type: ignore[operator]
    return " ".join(console.export_text().split())


def test_the_plan_says_what_the_seeds_can_resolve() -> None:
    counted = claim(metric="updates_lost", direction="less", smallest=50)
    pilot = trials([0.7, 0.8, 0.9, 0.84], lost=(0, 0, 0, 0))
    plans = planned([claim(), counted], 5, pilot, np.random.default_rng(0))
    assert [plan.pilot_seeds for plan in plans] == [4, 4]
    assert plans[0].power is not None
    assert plans[0].power < 0.1
    assert (plans[0].needed or 0) > 500
    assert (plans[1].power, plans[1].needed) == (0.0, 7), "2/2^7 is less than 5%/2, 2/2^6 is not"
    text = printed(print_plan, plans, 5, "an earlier run")
    assert "power, 5 seeds" in text
    assert "from 4 seeds of an earlier run" in text
    assert "Counts take at least 7 seeds" in text


def test_a_share_is_of_the_mean_of_the_other_strategy() -> None:
    share = claim(smallest="25%")
    (judged,) = judge(trials([1.1, 1.12, 1.11]), [share], np.random.default_rng(0))
    assert judged.claim.smallest == pytest.approx(0.2)
    assert not judged.claim.relative
    nothing = trials([0.5, 0.6], none=[0.0, 0.0])
    (unknown,) = judge(nothing, [share], np.random.default_rng(0))
    assert unknown.difference is None
    assert "which is 0" in unknown.unusable[-1]
