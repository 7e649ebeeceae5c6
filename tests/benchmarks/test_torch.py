"""The benchmark of torch modules: both loops train the same, and the table has the shares."""

from __future__ import annotations

import pytest

from benchmarks import torch as bench
from benchmarks.torch import VARIANTS, Model, timed

TINY = Model("transformer", "cpu", 2, 2, width=16, layers=1, tokens=4)


@pytest.mark.cluster
@pytest.mark.torch
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_trains(variant: bench.Variant) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make torch")
    row = timed(TINY, variant, rounds=2)
    assert len(row.bare) == len(row.replica) == 2
    assert row.share > 0
    assert row.phases.keys() == {*bench.PHASES, bench.REST}
    assert all(seconds > 0 for phase, seconds in row.phases.items() if phase != bench.REST)
    assert bench.table([row]).count(variant.name) == 2
    assert row.nbytes == 4 * sum(p.numel() for p in bench.made(TINY).parameters())
