"""The kinds of dps in a configuration: derived from their dataclasses, with what goes around."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import dps
from dps.protocol import wire
from flows.config import kinds, sections
from flows.config.experiment import TrialConfig, built
from tests.flows.config.test_experiment import SMALL, complaint, only


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL, sort_keys=False))
    return path


# -- derivation --------------------------------------------------------------------------------


def test_what_dps_exports_can_be_chosen() -> None:
    assert {"sgd", "adagrad", "delayed_proximal", "frozen"} <= kinds.RULES.derived.keys()
    assert {"top_k", "kkt", "quantise", "lossless"} <= kinds.FILTERS.derived.keys()
    assert {"none", "chain", "checkpoint"} <= kinds.DURABILITIES.derived.keys()
    around = {dps.PerArray, dps.Scheduled, dps.Clipped, dps.StalenessAware, dps.Layered}
    assert around.isdisjoint([*kinds.RULES.own, *kinds.DURABILITIES.own]), "by keys of their own"
    assert {rule.__name__ for rule in kinds.RULES.own} <= wire._TYPES.keys(), "beside checkpoints"


# -- what they build ---------------------------------------------------------------------------

L1 = "penalty: {kind: l1, strength: 2}"


@pytest.mark.parametrize(
    ("written", "built"),
    [
        ("{kind: sgd, learning_rate: 1, weight_decay: 0.5}", dps.WeightDecay(dps.SGD(1), 0.5)),
        (
            f"{{kind: delayed_proximal, l_var: 2, l_cov: 1, tau: 4, {L1}}}",
            dps.DelayedProximal(2.0, 1.0, 4, dps.L1(2.0)),
        ),
        (
            "{kind: adamw, schedule: {kind: warm_up, updates: 5, then: {kind: cosine, updates: 9, "
            "least: 0.1}}, clip: {norm: 1, value: 2}, staleness_aware: true}",
            dps.StalenessAware(
                dps.Clipped(
                    dps.Scheduled(dps.AdamW(), dps.WarmUp(5, dps.Cosine(9, 0.1))), norm=1, value=2
                )
            ),
        ),
        (
            "{kind: by_name, clip: {norm: 1}, rules: "
            "{'*.bias': {kind: frozen}, '*': {kind: adamw, staleness_aware: true}}}",
            dps.Clipped(
                dps.PerArray((("*.bias", dps.Frozen()), ("*", dps.StalenessAware(dps.AdamW())))),
                norm=1,
            ),
        ),
    ],
)
def test_optimizers(config: Path, written: str, built: dps.UpdateRule) -> None:
    trial = only(config, f"optimizer={written}")
    assert trial.optimizer.build() == built
    assert TrialConfig.model_validate(trial.model_dump(mode="json")) == trial


def test_filters_of_gradients_and_of_pulls(config: Path) -> None:
    chain = "[{kind: top_k, share: 1}, {kind: quantise, form: bf16, seed: 1}, {kind: lossless}]"
    pulled = "[{kind: significantly_modified, threshold: 0.5, decay: 1/t}]"
    trial = only(config, f"filters={{'*': {chain}}}", f"pull_filters={{'*': {pulled}}}")
    sent = [dps.TopK(1.0), dps.Quantise("bf16", 1), dps.Lossless()]
    assert built(trial.filters) == {"*": sent}
    assert built(trial.pull_filters) == {"*": [dps.SignificantlyModified(0.5, "1/t")]}
    assert TrialConfig.model_validate(trial.model_dump(mode="json")) == trial


# -- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimizer.kind=sdg", "unknown kind 'sdg'; did you mean 'sgd'?"),
        (
            "optimizer.learning_rate=fast",
            "learning_rate: expected a valid number, got 'fast'",
        ),
        ("optimizer={kind: proximal, learning_rate: 1}", "optimizer.penalty: is missing; add it"),
        ("optimizer.clip={}", "optimizer: Clipped: expected norm=…, value=… or both"),
        (
            "optimizer={kind: by_name, rules: {'*.bias': {kind: frozen}}}",
            "optimizer.rules: optimizer: no rule for 'layer0.weight'",
        ),
        (
            "optimizer={kind: by_name, rules: {'*': {kind: adam, clip: {norm: 1}}}}",
            "optimizer['*']: clipping applies to the whole gradient",
        ),
        ("filters={v: [{kind: lossless}]}", "filters['v']: no such array; expected one of"),
        ("filters={'*': [{kind: lossless}, {kind: lossless}]}", "Lossless is given twice"),
        (
            "pull_filters={'*': [{kind: kkt, strength: 1}]}",
            "discards withheld values; weights need a filter that sends them later",
        ),
        ("recovery={durability: {kind: chain, replicas: 0}}", "replicas: expected 1 or more whole"),
    ],
)
def test_mistakes_are_told(config: Path, override: str, told: str) -> None:
    assert told in complaint(config, override)


def test_an_objective_needs_one_rule_for_all_arrays(config: Path) -> None:
    told = complaint(
        config,
        "optimizer={kind: by_name, rules: {'*': {kind: adam}}}",
        "evaluation.objective={}",
    )
    assert "evaluation.objective: an objective needs one rule" in told


def test_a_kind_of_dps_is_found_without_looking_up_packages(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "entry_points", None)
    assert only(config).optimizer.build() == dps.SGD(0.1)
