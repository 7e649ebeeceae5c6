"""Configurations of whole replications, which `dps run` takes like those of experiments."""

from __future__ import annotations

from pathlib import Path

import pytest

from dps.errors import ConfigurationError
from flows.replication.config import ReplicationConfig, load_replication


def test_both_papers_have_one() -> None:
    assert load_replication("replicate/ttf") == ReplicationConfig(replication="ttf")
    assert load_replication("replicate/ftps") == ReplicationConfig(replication="ftps")


def test_an_experiment_is_none() -> None:
    assert load_replication("demo") is None


def test_it_can_be_told_more(tmp_path: Path) -> None:
    curves = tmp_path / "curves.csv"
    overrides = ["full=true", "virtual=true", f"published={curves}"]
    config = load_replication("replicate/ttf", overrides)
    assert config is not None
    assert config.full
    assert config.virtual
    assert config.curves == curves


@pytest.mark.parametrize(
    ("name", "override", "reason"),
    [
        ("replicate/ftps", "full=3", r"full: expected true or false, got 3"),
        ("replicate/ttf", "ful=true", r"ful: unknown key; did you mean 'full'"),
        ("replicate/ttf", "replication=tff", r"--set replication=tff: replication: .*ttf"),
        ("replicate/ftps", "published=a.csv", r"only the curves of ttf"),
        ("replicate/ttf", "replication.full=true", r"--set replication.full=true"),
    ],
)
def test_what_cannot_be_is_refused(name: str, override: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        load_replication(name, [override])
