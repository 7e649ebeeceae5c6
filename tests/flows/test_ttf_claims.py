"""The claims of the first paper, judged on hand-made trials."""

from __future__ import annotations

from pathlib import Path

import pytest

from dps.errors import ConfigurationError
from flows.statistics import Difference
from flows.ttf.claims import STATEMENTS, Judged, judge, verdict
from flows.ttf.figures import read_published
from flows.ttf.measures import Change, Measured

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
        "changes": (Change(0.5, 0.5 + jitter - 0.001, 1.0),) * kills,
        "pushed": 500,
        "seconds": 10.0 + jitter,
        "applied": 500,
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
        found.setdefault(each.statement.claim, []).append(each.verdict)
    return found


def test_what_is_true_by_construction_holds() -> None:
    trials = [
        *study(
            stateless={"changes": (Change(0.5, 0.6, 1.0),), "seconds": 10.0, "idle": 0.2},
            checkpoint={
                "changes": (Change(0.5, 0.4, 1.0),),
                "seconds": 12.0,
                "idle": 0.4,
                "to_target": 7.0,
            },
            chain={"changes": (Change(0.5, 0.45, 1.0),), "seconds": 11.0, "idle": 0.3},
        )
    ]
    assert by_claim(judge(trials)) == {claim: ["holds", "holds"] for claim in range(1, 6)}


def test_what_makes_no_difference_does_not_hold() -> None:
    verdicts = by_claim(judge(study()))
    assert verdicts.pop(4) == ["holds", "holds"], "the same price is what is claimed there"
    assert verdicts == {claim: ["does not hold"] * 2 for claim in (1, 2, 3, 5)}


def test_a_price_far_from_the_others_is_not_the_same() -> None:
    verdicts = by_claim(judge(study(stateless={"fixed_usd": 1.3e-3})))
    assert verdicts[4] == ["does not hold", "does not hold"]


def test_a_time_that_nobody_reached_tells_nothing() -> None:
    never = {"reached": False, "to_target": 10.0}
    verdicts = by_claim(judge(study(checkpoint=never, stateless=never)))
    assert verdicts[5][0] == "not resolved"


def test_two_seeds_resolve_nothing() -> None:
    trials = [t for t in study(stateless={"changes": (Change(0.5, 0.6, 1.0),)}) if t.seed < 2]
    assert {each.verdict for each in judge(trials)} == {"not resolved"}


@pytest.mark.parametrize(
    ("low", "high", "p", "expected"),
    [
        (0.02, 0.10, 0.001, "holds"),
        (0.02, 0.10, 0.2, "not resolved"),  # not after the correction
        (-0.02, 0.10, 0.3, "not resolved"),
        (-0.05, 0.005, 0.3, "does not hold"),
        (-0.05, -0.02, 0.001, "does not hold"),
        (0.001, 0.005, 0.001, "does not hold"),  # too small to matter
    ],
)
def test_intervals_decide(low: float, high: float, p: float, expected: str) -> None:
    found = Difference((low + high) / 2, low, high, 0.01, p, 6)
    assert verdict(STATEMENTS[0], found, p) == expected


def test_an_effect_is_told_with_its_interval_and_number_of_seeds() -> None:
    (first, *_) = judge(study(stateless={"changes": (Change(0.5, 0.6, 1.0),)}))
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
    ],
)
def test_broken_published_curves_are_refused_with_the_place(
    tmp_path: Path, text: str, named: str
) -> None:
    path = tmp_path / "curves.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=named):
        read_published(path)
