"""Schedules, weight decay and clipping in a configuration: what they build, which mistakes tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import dps
from dps.core.rules.rule import UpdateRule
from flows.config.experiment import TrialConfig, load_experiment
from flows.config.trials import expand
from tests.flows.config.test_experiment import SMALL, complaint, only


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL, sort_keys=False))
    return path


@pytest.mark.parametrize(
    ("settings", "built"),
    [
        ("{kind: adamw}", dps.AdamW()),
        (
            "{kind: adamw, learning_rate: 0.1, weight_decay: 0, beta1: 0.5}",
            dps.AdamW(0.1, 0.5, weight_decay=0.0),
        ),
        ("{kind: sgd, learning_rate: 1, weight_decay: 0.5}", dps.WeightDecay(dps.SGD(1), 0.5)),
        ("{kind: adam, weight_decay: 0}", dps.Adam()),
        (
            "{kind: momentum, learning_rate: 1, clip: {norm: 2}}",
            dps.Clipped(dps.Momentum(1.0), norm=2.0),
        ),
        ("{kind: adagrad, clip: {value: 3}}", dps.Clipped(dps.AdaGrad(), value=3.0)),
        (
            "{kind: ftrl, schedule: {kind: step, every: 100}}",
            dps.Scheduled(dps.FTRL(), dps.StepDecay(100)),
        ),
        (
            "{kind: sgd, learning_rate: 1, schedule: {kind: constant}}",
            dps.Scheduled(dps.SGD(1.0), dps.Constant()),
        ),
        (
            "{kind: sgd, learning_rate: 1, schedule: {kind: warm_up, updates: 5, start: 0.1}}",
            dps.Scheduled(dps.SGD(1.0), dps.WarmUp(5, start=0.1)),
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
def test_optimizers(config: Path, settings: str, built: UpdateRule) -> None:
    trial = only(config, f"optimizer={settings}")
    assert trial.build_optimizer() == built
    assert TrialConfig.model_validate(trial.model_dump(mode="json")) == trial


def test_an_axis_over_them_leaves_trials_without_them_as_they_were(config: Path) -> None:
    axes = (
        "axes={optimizer.schedule: {none: null, cosine: {kind: cosine, updates: 9}}, "
        "optimizer.weight_decay: [0, 0.1], optimizer.clip: {none: null, norm: {norm: 1}}}"
    )
    trials = expand(load_experiment(str(config), [axes]))
    as_it_was = only(config).model_dump(mode="json")
    assert [t.config.model_dump(mode="json") for t in trials].count(as_it_was) == 1
    assert len({trial.digest for trial in trials}) == 8


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimizer.clip={}", "optimizer.clip: expected norm, value or both, such as {norm: 1.0}"),
        ("optimizer.clip={norm: 0}", "optimizer.clip.norm: expected more than 0"),
        ("optimizer.clip=1", "optimizer.clip: expected a section with keys, got 1"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay: expected at least 0"),
        (
            "optimizer.schedule={kind: cosin, updates: 5}",
            "optimizer.schedule.kind: unknown kind 'cosin'; did you mean 'cosine'?",
        ),
        ("optimizer.schedule={kind: cosine}", "optimizer.schedule.updates: is missing"),
        (
            "optimizer.schedule={kind: cosine, updates: 5, least: 1}",
            "optimizer.schedule.least: expected less than 1",
        ),
        (
            "optimizer.schedule={kind: warm_up, updates: 5, than: {kind: constant}}",
            "than: unknown key; did you mean 'then'?",
        ),
        ("optimizer={kind: ftrl, weight_decay: 1}", "optimizer.weight_decay: unknown key"),
        (
            "optimizer={kind: by_name, rules: {}}",
            "optimizer.rules: optimizer: expected the rule of one array at least",
        ),
        (
            "optimizer={kind: by_name, rules: {'*.bias': {kind: frozen}}}",
            "optimizer.rules: optimizer: no rule for 'layer0.weight'",
        ),
        (
            "optimizer={kind: by_name, rules: {'*': {kind: adam}, bias: {kind: frozen}}}",
            "optimizer['bias']: no array or table has this rule; there are: layer0.weight",
        ),
        (
            "optimizer={kind: by_name, rules: {'*': {kind: adam, clip: {norm: 1}}}}",
            "optimizer['*']: a gradient is clipped as a whole",
        ),
        (
            "optimizer={kind: by_name, rules: {'*': {kind: frozen}}}",
            "optimizer.rules: all arrays are frozen: nothing would be trained",
        ),
        (
            "optimizer={kind: by_name, rules: {'*': {kind: adem}}}",
            "unknown kind 'adem'; did you mean 'adam'",
        ),
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
    assert "evaluation.objective: an objective has the penalty of one rule" in told
