"""Claims in a configuration: what they may say, and what is refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dps.errors import ConfigurationError
from flows.config.claims import ClaimSection
from flows.config.experiment import load_experiment

CONFIGS = Path(__file__).parents[3] / "configs"
DEMO = str(CONFIGS / "demo.yaml")
CLAIM = {
    "metric": "rto_seconds",
    "strategy": "chain",
    "against": "checkpoint",
    "condition": "kill",
    "direction": "less",
    "smallest": 0.5,
}


def claims(*given: dict[str, object], **sets: object) -> tuple[ClaimSection, ...]:
    written = {"claims": list(given), **sets}
    settings = [f"{key}={json.dumps(value)}" for key, value in written.items()]
    return load_experiment(DEMO, settings).claims


def test_a_condition_is_a_label_or_labels_by_axis_or_follows_from_the_grid() -> None:
    (said,) = claims(CLAIM)
    assert said.condition == {"faults": "kill"}
    (by_axis,) = claims({**CLAIM, "condition": {"faults": "kill"}})
    assert by_axis == said
    bare = {key: value for key, value in CLAIM.items() if key != "condition"}
    (only,) = claims(bare, **{"axes.faults": {"no fault": []}})
    assert only.condition == {"faults": "no fault"}


def test_the_smallest_difference_may_be_a_share_of_the_other_strategy() -> None:
    (claim,) = claims({**CLAIM, "smallest": "25%"})
    assert (claim.smallest, claim.relative) == (0.25, True)
    assert claim.resolved(-8.0).smallest == 2.0
    assert ClaimSection.model_validate(claim.model_dump()) == claim


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": "rto_second"}, r"claims.0.metric: .*did you mean 'rto_seconds'"),
        ({"strategy": "chian"}, r"claims.0.strategy: no strategy 'chian'; did you mean"),
        ({"against": "none-given"}, r"claims.0.against: .* compared with 0.*never below"),
        ({"condition": "kil"}, r"claims.0.condition: no label 'kil'; did you mean 'kill'"),
        ({"condition": {}}, r"claims.0.condition: a label on the axis 'faults' is missing"),
        ({"direction": "lower"}, r"claims.0.direction: unknown direction 'lower'"),
        ({"smallest": "25%", "against": "none-given"}, r"claims.0.smallest: a share needs"),
        ({"smallest": 0}, r"claims.0.smallest: expected greater than 0"),
    ],
)
def test_what_cannot_be_judged_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        claims({**CLAIM, **change})


def test_a_figure_that_is_a_difference_already_needs_nothing_to_be_compared_with() -> None:
    written = {**CLAIM, "metric": "effect_time_mean", "against": "none-given"}
    without = {key: value for key, value in written.items() if key != "against"}
    [said], [left_out] = claims(written), claims(without)
    assert said.one_sample
    assert said == left_out


FEWER = {
    **CLAIM,
    "strategy": "checkpoint",
    "against": {"training.workers": 2},
    "condition": {"faults": "kill", "training.workers": 4},
}
WORKERS = {"axes.training.workers": [2, 4]}


def test_a_strategy_may_be_compared_with_itself_under_another_condition() -> None:
    (found,) = claims(FEWER, **WORKERS)
    other = {"faults": "kill", "training.workers": "2"}
    assert found.sides == (("checkpoint", found.condition), ("checkpoint", other))
    assert found.side_of("checkpoint", {"recovery": "checkpoint", **other}) == 1
    assert found.side_of("chain", {"recovery": "chain", **other}) is None
    assert found.baseline == "training.workers 2"
    assert not found.one_sample


@pytest.mark.parametrize(
    ("against", "message"),
    [
        ({"training.workers": 4}, r"claims.0.against: compares the strategy with itself"),
        ({"training.workers": 3}, r"claims.0.against.training.workers: no label '3'"),
        ({"workers": 2}, r"claims.0.against: no axis 'workers'"),
    ],
)
def test_another_condition_that_there_is_not_is_refused(against: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        claims({**FEWER, "against": against}, **WORKERS)


def test_the_same_is_claimed_once() -> None:
    with pytest.raises(ConfigurationError, match=r"claims.1: repeats an earlier"):
        claims(CLAIM, {**CLAIM, "claim": "in other words"})
    assert len(claims(CLAIM, {**CLAIM, "smallest": 0.6})) == 2


def test_what_the_grid_leaves_out_cannot_be_claimed() -> None:
    with pytest.raises(ConfigurationError, match=r"claims.0: the grid leaves out 'chain'"):
        claims(CLAIM, exclude=[{"recovery": "chain", "faults": "kill"}])


def test_claims_of_a_file_go_with_the_axes_that_an_override_takes_away() -> None:
    written = len(load_experiment(DEMO).claims)
    assert written > 1
    assert 0 < len(load_experiment(DEMO, ["axes.recovery=[none, chain]"]).claims) < written
    assert load_experiment(DEMO, ["axes={}"]).claims == ()
