"""Filters and delay compensation in a configuration: what they build, and how mistakes are told."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

import dps
from dps.core.filters.filter import Filter
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
        ("[{kind: significantly_modified, threshold: 1}]", [dps.SignificantlyModified(1.0)]),
        (
            "[{kind: significantly_modified, threshold: 0.5, decay: 1/t}]",
            [dps.SignificantlyModified(0.5, "1/t")],
        ),
        ("[{kind: random_skip, share: 0.9, seed: 3}]", [dps.RandomSkip(0.9, 3)]),
        ("[{kind: top_k, share: 0.01}]", [dps.TopK(0.01)]),
        ("[{kind: quantise, form: int8}]", [dps.Quantise("int8")]),
        (
            "[{kind: top_k, share: 1}, {kind: quantise, form: bf16, seed: 1}, {kind: lossless}]",
            [dps.TopK(1.0), dps.Quantise("bf16", 1), dps.Lossless()],
        ),
        ("[]", []),
    ],
)
def test_filters(config: Path, settings: str, built: list[Filter]) -> None:
    trial = only(config, f"filters={{'*': {settings}}}")
    assert trial.build_filters() == {"*": built}
    assert TrialConfig.model_validate(trial.model_dump(mode="json")) == trial


def test_kkt_goes_with_an_l1_penalty(config: Path) -> None:
    proximal = "optimizer={kind: proximal, learning_rate: 1, penalty: {kind: l1, strength: 0.2}}"
    kkt = "filters={layer0.weight: [{kind: kkt, strength: 0.2, delta: 0.1}]}"
    assert only(config, proximal, kkt).build_filters() == {"layer0.weight": [dps.KKT(0.2, 0.1)]}
    assert "filters: filters['layer0.weight']: KKT(strength=0.2" in complaint(config, kkt)


def test_an_axis_over_filters_leaves_trials_without_them_as_they_were(config: Path) -> None:
    axes = "axes={filters: {none: {}, some: {'*': [{kind: lossless}]}}}"
    without, some = expand(load_experiment(str(config), [axes]))
    assert without.config.model_dump(mode="json") == only(config).model_dump(mode="json")
    assert without.digest != some.digest
    assert some.config.build_filters() == {"*": [dps.Lossless()]}


def test_pull_filters_are_built_like_those_of_gradients(config: Path) -> None:
    chain = "[{kind: significantly_modified, threshold: 0.5}, {kind: quantise, form: int8}]"
    trial = only(config, f"pull_filters={{'*': {chain}}}")
    built = [dps.SignificantlyModified(0.5), dps.Quantise("int8")]
    assert trial.build_pull_filters() == {"*": built}
    assert trial.build_filters() == {}
    assert TrialConfig.model_validate(trial.model_dump(mode="json")) == trial


def test_an_axis_over_pull_filters_leaves_trials_without_them_as_they_were(config: Path) -> None:
    axes = "axes={pull_filters: {none: {}, some: {'*': [{kind: lossless}]}}}"
    without, some = expand(load_experiment(str(config), [axes]))
    assert without.config.model_dump(mode="json") == only(config).model_dump(mode="json")
    assert without.digest != some.digest


def test_delay_compensation_wraps_the_rule(config: Path) -> None:
    compensated = only(config, "optimizer.delay_compensation=0.5")
    assert compensated.build_optimizer() == dps.DelayCompensated(dps.SGD(0.1), 0.5)
    both = only(config, "optimizer.delay_compensation=0", "optimizer.staleness_aware=true")
    expected = dps.DelayCompensated(dps.StalenessAware(dps.SGD(0.1)), 0.0)
    assert both.build_optimizer() == expected
    assert TrialConfig.model_validate(both.model_dump(mode="json")) == both


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("filters={v: [{kind: lossless}]}", "filters['v']: there is no such array; there are:"),
        ("filters={'*': [{kind: topk}]}", "unknown kind 'topk'; did you mean 'top_k'?"),
        ("filters={'*': [{kind: top_k, share: 2}]}", "share: expected at most 1"),
        ("filters={'*': [{kind: top_k, k: 2}]}", "k: unknown key"),
        ("filters={'*': [{kind: kkt, strength: 1, delta: 2}]}", "expected at most strength=1"),
        ("filters={'*': [{kind: lossless}, {kind: lossless}]}", "Lossless is there twice"),
        (
            "filters={'*': [{kind: quantise, form: int8}, {kind: top_k, share: 0.5}]}",
            "first say which entries are sent",
        ),
        ("filters={'*': {kind: lossless}}", "filters.*: expected a list"),
        ("filters=[{kind: lossless}]", "filters: expected keys and values"),
        (
            "pull_filters={v: [{kind: lossless}]}",
            "pull_filters['v']: there is no such array; there are:",
        ),
        (
            "pull_filters={'*': [{kind: kkt, strength: 1}]}",
            "drops what it withholds of a gradient; weights need a filter that sends it later",
        ),
        ("optimizer.delay_compensation=-1", "optimizer.delay_compensation: expected at least 0"),
    ],
)
def test_mistakes_are_told(config: Path, override: str, told: str) -> None:
    assert told in complaint(config, override)


def test_compression_needs_its_library(config: Path) -> None:
    with patch("dps.protocol.compression.find_spec", return_value=None):
        for which in ("filters", "pull_filters"):
            assert "pip install lz4" in complaint(config, f"{which}={{'*': [{{kind: lossless}}]}}")


def test_pull_filters_and_copies_that_shards_are_rebuilt_from_exclude_each_other(
    config: Path,
) -> None:
    told = complaint(
        config,
        "pull_filters={'*': [{kind: lossless}]}",
        "recovery={durability: {kind: worker_cache}}",
    )
    assert "pull_filters: worker_cache brings a shard back from what workers have read" in told
