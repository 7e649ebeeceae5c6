"""The claims of the first paper, judged on hand-made trials."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dps.errors import ConfigurationError
from flows.analysis.statistics.claims import FIXED
from flows.replication.ttf.claims import (
    CLAIMS,
    LATE,
    NODES,
    SEEDS_ONLY,
    STATEMENTS,
    Judged,
    fixed,
    judge,
)
from flows.replication.ttf.figures import read_published
from flows.replication.ttf.findings import AS_PUBLISHED, CORRECTED, Study, claims_table
from flows.replication.ttf.measures import Change, Measured

SEEDS = range(10)


def trial(strategy: str, kills: int, seed: int, **given: object) -> Measured:
    """A trial in which nothing differs between strategies, but for what is given."""
    jitter = 0.001 * (seed % 3)
    values: dict[str, object] = {
        "label": strategy,
        "strategy": strategy,
        "condition": f"k={kills}",
        "workers": 2,
        "kills": kills,
        "seed": seed,
        "changes": (Change(0.5, 0.5 + jitter - 0.001, 1.0, 0.0),) * kills,
        "pushed": 500,
        "seconds": 10.0 + jitter,
        "lost": 0,
        "final": 0.9,
        "to_target": 5.0 + jitter,
        "reached": True,
        "idle": 0.2 + jitter,
        "fixed_usd": 1e-3,
        **given,
    }
    return Measured(**values)  # type: ignore[arg-type]


def study(**of_strategy: dict[str, object]) -> list[Measured]:
    """Trials of all strategies, numbers of kills and seeds; what is given holds with kills."""
    return [
        trial(strategy, kills, seed, **(of_strategy.get(strategy, {}) if kills else {}))
        for strategy in ("checkpoint", "chain", "stateless")
        for kills in (0, 1, 2)
        for seed in SEEDS
    ]


def by_claim(judged: tuple[Judged, ...]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for each in judged:
        if each.statement.judged:
            found.setdefault(each.statement.claim, []).append(each.verdict)
    return found


def on_a_rising_curve(effect: float, learning: float, seed: int) -> tuple[Change, ...]:
    """Accuracy across a kill where so much was learnt meanwhile without it."""
    jitter = 0.001 * (seed % 3)
    return (Change(0.4, 0.4 + learning + effect + jitter, 1.2, learning),)


def test_what_is_true_by_construction_holds() -> None:
    trials = [
        *study(
            stateless={"changes": (Change(0.5, 0.6, 1.0, 0.0),), "seconds": 10.0, "idle": 0.2},
            checkpoint={
                "changes": (Change(0.5, 0.4, 1.0, 0.0),),
                "seconds": 12.0,
                "idle": 0.4,
                "to_target": 7.0,
            },
            chain={"changes": (Change(0.5, 0.45, 1.0, 0.0),), "seconds": 11.0, "idle": 0.3},
        )
    ]
    assert by_claim(judge(trials)) == {
        claim: ["holds"] * number for claim, number in {1: 3, 2: 2, 3: 4, 4: 6, 5: 2}.items()
    }


def test_what_would_have_been_learnt_anyway_is_no_effect_of_a_kill() -> None:
    """Accuracy rises across every kill, but less than it does in the same seconds without one."""
    effects = {"stateless": -0.18, "checkpoint": -0.30, "chain": 0.0}
    trials = [
        replace(each, changes=on_a_rising_curve(effects[each.strategy], 0.24, each.seed))
        if each.kills
        else each
        for each in study()
    ]
    judged = judge(trials)
    verdicts = by_claim(judged)
    assert verdicts[1] == ["does not hold", "holds", "does not hold"], "18 is between 30 and 0"
    assert verdicts[2] == ["holds", "does not hold"]
    told = {each.statement.text: each for each in judged if each.statement.claim in (1, 2)}
    published = [each for text, each in told.items() if "as published" in text]
    assert [each.verdict for each in published] == ["not judged"] * 4
    assert published[0].effect().startswith("+6.1 [+6.0, +6.2] points")
    controlled = next(each for text, each in told.items() if text.startswith("stateless: change"))
    assert controlled.effect().startswith("-17.9 [-18.0, -17.8] points")


def test_what_is_not_judged_makes_no_verdict_harder_to_reach() -> None:
    judged = judge(study(stateless={"changes": (Change(0.5, 0.6, 1.0, 0.0),)}))
    tested = [each for each in judged if each.statement.judged and not each.statement.same]
    assert len(judged) - len(tested) == 4 + 6, "as published, and the price"


def test_without_controls_claims_of_what_a_kill_does_are_not_resolved() -> None:
    """As published, accuracy rises across a kill; whether it would have anyway is not known."""
    trials = study(stateless={"changes": (Change(0.5, 0.6, 1.0),)})
    bare = [replace(t, changes=tuple(replace(c, control=None) for c in t.changes)) for t in trials]
    judged = judge(bare)
    assert by_claim(judged)[1] == ["not resolved"] * 3
    assert by_claim(judged)[2] == ["not resolved"] * 2
    assert {each.effect() for each in judged if "first kill" in each.statement.text} == {"–"}


def test_a_claim_is_worded_as_the_direction_that_it_is_judged_by() -> None:
    """Whatever the size, as long as it goes the way that is claimed."""
    far = judge(study(checkpoint={"to_target": 50.0}))
    assert by_claim(far)[5] == ["holds", "holds"]
    assert "takes longer" in CLAIMS[5]
    sizes = [text for text in CLAIMS.values() if "10" in text]
    assert all("published: " in text.partition("10")[0] for text in sizes)
    assert not any("converge" in text for text in CLAIMS.values()), "that is not measured"


def test_what_makes_no_difference_does_not_hold() -> None:
    verdicts = by_claim(judge(study()))
    assert verdicts.pop(4) == ["holds"] * 6, "the same price is what is claimed there"
    numbers = {1: 3, 2: 2, 3: 4, 5: 2}
    assert verdicts == {claim: ["does not hold"] * number for claim, number in numbers.items()}


def test_the_price_of_trials_that_take_a_given_time_is_no_finding() -> None:
    priced = [each for each in judge(study(), timed=True) if each.statement.claim == 4]
    told = [(each.verdict, each.effect()) for each in priced]
    assert told == [("by construction", "+0.0%")] * 6
    published = Study(AS_PUBLISHED, (), tuple(study()), (), 54)
    assert claims_table({AS_PUBLISHED: published}).count("**by construction**") == 6
    assert "**by construction**" not in claims_table({CORRECTED: published})


def test_a_price_far_from_the_others_is_not_the_same() -> None:
    verdicts = by_claim(judge(study(stateless={"fixed_usd": 1.3e-3})))
    assert verdicts[4] == ["holds", "does not hold", "does not hold"] * 2, "without a kill it is"


def test_prices_that_go_different_ways_do_not_make_one_that_is_the_same() -> None:
    """On average over one and two kills the stateless server costs 2% more than a checkpoint."""
    price = {0: 1.38e-3, 1: 1.18e-3, 2: 0.86e-3}
    trials = [
        replace(each, fixed_usd=(price[each.kills] if each.strategy == "stateless" else 1e-3))
        for each in study()
    ]
    judged = [each for each in judge(trials) if each.statement.claim == 4]
    against = {each.statement.text: each for each in judged if "checkpoint" in each.statement.text}
    assert [each.verdict for each in against.values()] == ["does not hold"] * 3
    assert [each.effect().split(" ")[0] for each in against.values()] == ["+38.0", "+18.0", "-14.0"]
    assert [text.partition(":")[0] for text in against] == ["no kill", "one kill", "two kills"]
    near = [replace(each, fixed_usd=1e-3) if each.kills == 2 else each for each in trials]
    assert by_claim(judge(near))[4] == ["does not hold", "does not hold", "holds"] * 2


def test_a_price_that_is_the_same_on_average_over_workers_is_not_the_same() -> None:
    """Twenty per cent dearer with one worker and 18 cheaper with four: 1% dearer on average."""
    over = {1: 1.2, 4: 0.82}
    trials = [
        replace(
            each,
            workers=workers,
            fixed_usd=1e-3 * (over[workers] if each.strategy == "stateless" else 1.0),
        )
        for each in study()
        for workers in over
    ]
    judged = [each for each in judge(trials) if each.statement.claim == 4]
    assert {each.verdict for each in judged} == {"does not hold"}
    told = "+1.0 [+1.0, +1.0]%, n=10; by workers: +20.0% with 1, -18.0% with 4"
    assert {each.effect() for each in judged} == {told}
    close = [replace(t, fixed_usd=1e-3) if t.workers == 4 else t for t in trials]
    assert "does not hold" in by_claim(judge(close))[4], "not the same with one worker"
    same = [replace(t, fixed_usd=1e-3) for t in trials]
    assert by_claim(judge(same))[4] == ["holds"] * 6


def test_a_time_that_nobody_reached_tells_nothing() -> None:
    never = {"reached": False, "to_target": 10.0}
    verdicts = by_claim(judge(study(checkpoint=never, stateless=never)))
    assert verdicts[5][0] == "not resolved"


def test_a_side_that_never_reaches_the_target_is_not_the_faster_one() -> None:
    """Its trials just end sooner."""
    trials = study(stateless={"reached": False, "to_target": 6.0}, checkpoint={"to_target": 7.2})
    found = next(each for each in judge(trials) if each.statement.claim == 5)
    assert found.verdict == "not resolved"
    assert found.effect() == "at most +20.0 [+20.0, +20.0]%, n=10; target reached by 10 and 0 of 10"


def test_bounds_support_what_they_understate() -> None:
    late = study(checkpoint={"reached": False, "to_target": 7.2})
    early = study(stateless={"reached": False, "to_target": 6.0}, checkpoint={"to_target": 5.0})
    for trials, expected in ((late, "holds"), (early, "does not hold")):
        found = next(each for each in judge(trials) if each.statement.claim == 5)
        assert found.verdict == expected


def test_bounds_of_both_kinds_resolve_nothing() -> None:
    trials = study(checkpoint={"to_target": 7.2})
    odd = [
        replace(t, reached=(t.strategy == "checkpoint") == (t.seed == 0)) if t.seed < 2 else t
        for t in trials
    ]
    found = next(each for each in judge(odd) if each.statement.claim == 5)
    assert found.verdict == "not resolved"
    assert found.effect() == "–; target reached by 9 and 9 of 10"


def test_only_trials_that_share_kills_workers_and_seed_are_set_beside_each_other() -> None:
    """Price and pace depend on workers and kills alone, but each side lacks another cell."""
    trials = [
        trial(
            name,
            kills,
            seed,
            workers=w,
            fixed_usd=w * (1 + kills),
            pushed=100 * w,
            seconds=1 + kills,
        )
        for name in ("checkpoint", "chain", "stateless")
        for kills in (0, 1, 2)
        for w in (1, 4)
        for seed in SEEDS
        if (name, kills, w) not in {("stateless", 1, 4), ("checkpoint", 2, 1)}
    ]
    judged = [each for each in judge(trials) if each.statement.claim in (3, 4)]
    means = [each.difference and each.difference.mean for each in judged]
    assert means == [pytest.approx(0), *[0] * 9]


def test_there_is_no_ratio_to_nothing() -> None:
    free = [replace(each, fixed_usd=0.0, to_target=0.0) for each in study()]
    assert {each.difference for each in judge(free) if each.statement.claim in (4, 5)} == {None}


def test_two_seeds_resolve_nothing() -> None:
    trials = [t for t in study(stateless={"changes": (Change(0.5, 0.6, 1.0, 0.0),)}) if t.seed < 2]
    verdicts = {each.verdict for each in judge(trials) if each.statement.judged}
    assert verdicts == {"not resolved"}


@pytest.mark.parametrize(("seeds", "expected"), [(5, "not resolved"), (10, "does not hold")])
def test_few_seeds_with_the_same_value_resolve_nothing(seeds: int, expected: str) -> None:
    same = {"changes": (Change(0.5, 0.4, 1.0, 0.0),)}
    judged = judge([t for t in study(stateless=same) if t.seed < seeds])
    first = next(each for each in judged if each.statement.judged)
    assert first.verdict == expected


@pytest.mark.parametrize(
    ("effect", "spread", "expected"),
    [
        (0.06, 0.01, "holds"),
        (0.06, 0.09, "not resolved"),
        (0.04, 0.05, "not resolved"),  # seen alone p is 0.032: not after the correction
        (-0.02, 0.05, "not resolved"),  # seen alone p is 0.016 against a point: the same
        (-0.04, 0.02, "does not hold"),
        (0.003, 0.001, "does not hold"),  # too small to matter
    ],
)
def test_for_and_against_are_judged_by_one_rule(
    effect: float, spread: float, expected: str
) -> None:
    """Nine seeds, and seventeen statements in the study."""
    steps = [-1.5, -1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0, 1.5]  # whose spread is 0.97
    trials = [
        replace(each, changes=(Change(0.4, 0.4 + effect + spread * steps[each.seed], 1.2, 0.0),))
        if each.kills and each.strategy == "stateless"
        else each
        for each in study()
        if each.seed < len(steps)
    ]
    text = "stateless: change across the first kill"
    (found,) = (each for each in judge(trials) if each.statement.text.startswith(text))
    assert found.verdict == expected


def test_an_effect_is_told_with_its_interval_and_number_of_seeds() -> None:
    (first, *_) = judge(study(stateless={"changes": (Change(0.5, 0.6, 1.0, 0.0),)}))
    assert first.effect() == "+10.0 [+10.0, +10.0] points, n=10"


# -- the published curves ----------------------------------------------------------------------

HEADER = "recording,configuration,kills,seconds_since_first_evaluation,accuracy,loss"


def test_published_curves_are_read_by_configuration_and_kills(tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    rows = ["kill30_recover20,SYNC_CHECKPOINTING,1,0,0.1,2", "recover30,SYNC_CHECKPOINTING,1,0,9,9"]
    path.write_text("\n".join([HEADER, *rows, "kill30_recover20,SYNC_CHECKPOINTING,1,2,0.2,2"]))
    assert read_published(path) == {("sync checkpoint", 1): ([0.0, 2.0], [0.1, 0.2])}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("recording,kills\n", "configuration"),
        (f"{HEADER}\nkill30_recover20,SYNC_CHECKPOINTING,1,zero,0.1,2\n", "line 2"),
        (f"{HEADER}\nkill30_recover20,MAGIC,1,0,0.1,2\n", "line 2: configuration 'MAGIC'"),
        (f"{HEADER}\nrecover30,SYNC_CHECKPOINTING,1,0,9,9\n", "no row of .*'kill30_recover20'"),
    ],
)
def test_broken_published_curves_are_refused_with_the_place(
    tmp_path: Path, text: str, named: str
) -> None:
    path = tmp_path / "curves.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=named):
        read_published(path)


# -- what stands beside a verdict --------------------------------------------------------------


def notes(trials: list[Measured]) -> dict[str, tuple[str, ...]]:
    return {each.statement.text: each.notes for each in judge(trials) if each.statement.judged}


FIRST_KILL = "stateless: change across the first kill minus the control's over the same seconds"
REWORDED = "share of its own pace without kills that stateless keeps, minus that of chain"


def named(virtual: bool = False, without: str = "") -> list[Measured]:
    """Trials whose records name the statements that there were, but for one."""
    names = {name.removeprefix(FIXED) for name in fixed()}
    names -= {each.digest for each in STATEMENTS if each.text == without}
    return [replace(each, fixed=frozenset(names), virtual=virtual) for each in study()]


def test_a_statement_that_the_records_name_was_there_before_them() -> None:
    told = notes(named())
    assert told[FIRST_KILL] == told[REWORDED] == ()
    late = notes(named(without=FIRST_KILL))[FIRST_KILL]
    assert late == (f"{LATE}: 90 of 90 trials had begun before",)


def test_on_virtual_time_the_same_seeds_are_no_new_data() -> None:
    told = notes(named(virtual=True))
    assert told[FIRST_KILL] == ()
    assert told[REWORDED] == (LATE, SEEDS_ONLY)


def test_what_numbers_of_nodes_settle_is_marked() -> None:
    told = notes(named())
    assert {text for text, said in told.items() if NODES in said} == {
        f"{kills}: price of stateless over chain, minus 1"
        for kills in ("no kill", "one kill", "two kills")
    }
