"""The recovery benchmark: its verdicts, and one real recovery of each kind."""

from __future__ import annotations

import pytest

from benchmarks import overhead as bench_cost
from benchmarks import recovery as bench_recovery
from benchmarks.overhead import Prepared, Turn, costs, ratio
from benchmarks.recovery import recovery_times
from dps.protocol.timings import Timings
from dps.recovery.chain import Chain
from dps.recovery.strategy import Recovery


def test_ratios_are_taken_round_by_round() -> None:
    def turns(*rates: float) -> list[Turn]:
        return [Turn(rate, {}, 0) for rate in rates]

    assert ratio(turns(50, 10, 30), turns(100, 10, 100)) == 0.5


@pytest.mark.slow
@pytest.mark.cluster
def test_a_server_that_is_killed_and_one_that_is_stopped_recover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_recovery, "STRATEGIES", ("chain",))
    rows = recovery_times(1, print)
    assert [row.kind for row in rows] == ["kill", "pause"]
    for row in rows:
        (found,) = row.times
        assert found.source == "promoted"
        assert found.decide_seconds is not None
        assert found.rto_seconds is not None
    # A stopped process is killed by its monitor, long before its lease is over.
    assert Timings().lease > rows[1].totals[0] > Timings().stopped
    assert Timings().lease > rows[0].totals[0]


@pytest.mark.slow
@pytest.mark.cluster
def test_what_a_chain_costs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = (Prepared("none", Recovery(), 1.0), Prepared("chain(2)", Recovery(Chain()), 0.75))
    monkeypatch.setattr(bench_cost, "STRATEGIES", strategies)
    monkeypatch.setattr(bench_cost, "WARM_UP", 1)
    monkeypatch.setattr(bench_cost, "GRADIENTS", 10)
    turns = costs(print, rounds=1)
    (none,), (chain,) = turns["none"], turns["chain(2)"]
    assert none.sent["replicate"] == 0
    assert chain.sent["replicate"] >= 3.25e6
    assert chain.memory > none.memory
    summed = bench_cost.sums_table({"chain(2)": [chain], "sums of 4": [chain]})
    assert summed.splitlines()[-1].split()[:5] == ["sums", "of", "4", f"{chain.rate:.1f}", "1.00"]
    lines = bench_cost.table(turns).splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["none", "chain(2)"]
