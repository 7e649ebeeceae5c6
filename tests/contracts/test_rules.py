"""The contract of update rules, for each that dps has."""

from __future__ import annotations

from pathlib import Path

import pytest

import dps
from dps.core.rules.rule import UpdateRule
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.durability import Durability
from dps.recovery.shared_store import SharedStore
from tests.contracts.rules import RuleContract, ShardRuleContract

RULES: list[UpdateRule] = [
    dps.SGD(0.5),
    dps.Momentum(0.1),
    dps.Momentum(0.1, nesterov=True),
    dps.Accumulated(dps.Adam(0.1), 3),
    dps.AdaGrad(0.5),
    dps.Adam(0.1),
    dps.AdamW(0.1, weight_decay=0.5),
    dps.FTRL(0.5, beta=0.1, l1=0.2, l2=0.1),
    dps.Proximal(0.1, dps.L1(0.3)),
    dps.Proximal(0.1, dps.L2(0.3)),
    dps.Proximal(0.1, dps.ElasticNet(0.3, 0.1)),
    dps.Proximal(0.1, dps.GroupL1(0.3)),
    dps.DelayedProximal(2.0, 1.0, 4, dps.L1(0.1)),
    dps.StalenessAware(dps.Adam(0.1)),
    dps.DelayCompensated(dps.StalenessAware(dps.Momentum(0.1)), 0.5),
    dps.WeightDecay(dps.Momentum(0.1), 0.2),
    dps.Scheduled(dps.Adam(0.1), dps.WarmUp(2, dps.Cosine(4, least=0.1), start=0.5)),
    dps.Scheduled(dps.Momentum(0.1), dps.StepDecay(3, 0.5)),
    dps.Scheduled(dps.DelayCompensated(dps.SGD(0.1), 0.5), dps.StepDecay(5)),
    dps.Clipped(dps.Momentum(0.1), norm=2.0, value=1.0),
    dps.Frozen(),
]
OF_ARRAYS: list[UpdateRule] = [
    dps.PerArray((("w", dps.Adam(0.1)), ("*", dps.WeightDecay(dps.Momentum(0.1), 0.1)))),
    dps.PerArray((("w*", dps.DelayCompensated(dps.AdaGrad(0.1), 0.5)), ("b", dps.Frozen()))),
    dps.Clipped(
        dps.Scheduled(
            dps.PerArray((("w", dps.AdamW(0.1)), ("b", dps.StalenessAware(dps.SGD(0.1))))),
            dps.WarmUp(3, dps.Cosine(4)),
        ),
        norm=1.0,
    ),
]


class TestRules(RuleContract):
    @pytest.fixture(params=RULES, ids=str)
    def rule(self, request: pytest.FixtureRequest) -> UpdateRule:
        chosen: UpdateRule = request.param
        return chosen

    @pytest.fixture
    def durability(self, rule: UpdateRule, tmp_path: Path) -> Durability:
        """One for each rule, all of them in turn."""
        kinds = (Chain(2), SharedStore(), Checkpoint(1, "sync", path=str(tmp_path)))
        return kinds[RULES.index(rule) % 3]

    @pytest.mark.slow
    def test_the_loss_of_a_server_changes_no_bit(
        self, rule: UpdateRule, durability: Durability
    ) -> None:
        super().test_the_loss_of_a_server_changes_no_bit(rule, durability)


class TestRulesOfArrays(ShardRuleContract):
    @pytest.fixture(params=OF_ARRAYS, ids=str)
    def rule(self, request: pytest.FixtureRequest) -> UpdateRule:
        chosen: UpdateRule = request.param
        return chosen

    @pytest.mark.slow
    def test_the_loss_of_a_server_changes_no_bit(
        self, rule: UpdateRule, durability: Durability
    ) -> None:
        super().test_the_loss_of_a_server_changes_no_bit(rule, durability)


def test_every_rule_and_penalty_that_can_be_imported_is_here() -> None:
    public = [getattr(dps, name) for name in dps.__all__ if name not in ("ParameterServer",)]
    made = {type(rule) for rule in RULES} | {type(getattr(rule, "penalty", rule)) for rule in RULES}
    found = {c for c in public if hasattr(c, "step") or hasattr(c, "shrink")}
    assert found - {dps.UpdateRule, dps.Penalty, dps.PerArray} == made
