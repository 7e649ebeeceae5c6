"""The benchmark of torch modules: both loops train the same, and the table has the shares."""

from __future__ import annotations

import pytest

from benchmarks import torch as bench
from benchmarks.torch import ON_CPU, VARIANTS, Model, Row, seconds, table, timed
from dps.errors import ConfigurationError

TINY = Model("transformer", "cpu", 2, 2, width=16, layers=1, tokens=4)


def test_the_table_has_the_shares_and_says_what_was_wanted() -> None:
    rows = [
        Row(ON_CPU[0], VARIANTS[0], 3_250_000, [0.010, 0.012, 0.5], [0.011, 0.024, 0.5]),
        Row(ON_CPU[0], VARIANTS[1], 3_250_000, [0.010] * 3, [0.012] * 3),
        Row(ON_CPU[1], VARIANTS[0], 9_000_000, [0.1] * 3, [0.2] * 3),
    ]
    first, second, third = table(rows).splitlines()[4:7]
    assert first.split() == [
        "CNN",
        "cpu",
        "3.2",
        "none",
        "12.0",
        "ms",
        "24.0",
        "ms",
        "0.91",
        "≥",
        "0.85",
        "met",
    ]
    assert second.split() == [
        "CNN",
        "cpu",
        "3.2",
        "none,",
        "ahead",
        "1",
        "10.0",
        "ms",
        "12.0",
        "ms",
        "0.83",
    ]
    assert third.split() == [
        "transformer",
        "cpu",
        "9.0",
        "none",
        "100.0",
        "ms",
        "200.0",
        "ms",
        "0.50",
    ]
    assert "3 rounds" in table(rows)
    assert "No CUDA device is there" in table(rows)


def test_all_steps_are_timed_with_what_is_under_way() -> None:
    calls: list[str] = []
    assert seconds(lambda: calls.append("step"), lambda: calls.append("settle"), 3) > 0
    assert calls == ["settle", "step", "step", "step", "settle"]


def test_who_has_no_torch_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.workloads.with_torch.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="install the extra torch"):
        bench.measure(print)


@pytest.mark.cluster
@pytest.mark.torch
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_trains(variant: bench.Variant) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make torch")
    row = timed(TINY, variant, rounds=2)
    assert len(row.bare) == len(row.replica) == 2
    assert row.share > 0
    assert row.nbytes == 4 * sum(p.numel() for p in bench.made(TINY).parameters())
