"""Descriptions in MLflow, without a store: the tables of means, and what is told of a trial."""

from __future__ import annotations

import re
from dataclasses import replace

from flows.analysis.comparison import Compared
from flows.analysis.faults import FaultTimes
from flows.analysis.outcome import outcome
from flows.analysis.prices import load_prices
from flows.analysis.statistics import Interval
from flows.metrics.score import SCORES
from flows.records.record import Record
from flows.tracking.notes import comparison_tables, trial_note
from tests.support.synthetic import toy_events


def compared(
    strategy: str, metric: str, mean: float, bounds: tuple[float, float], n: int
) -> Compared:
    found = Interval(mean, *bounds, n) if n else None
    return Compared(metric, "kill", strategy, "none", found, None, None, None, None)


def test_a_table_says_of_how_many_seeds_each_mean_is() -> None:
    rows = [
        compared("none", "target_seconds", 30.0, (20.0, 40.0), 2),
        compared("none", "rto_seconds", 2.0, (1.5, 2.5), 5),
        compared("a|b", "target_seconds", 0.0, (0.0, 0.0), 0),
        compared("a|b", "rto_seconds", 1.0, (-0.5, 2.5), 4),
        compared("a|b", "updates_lost", 7.0, (3.0, 11.0), 4),
    ]
    [text] = comparison_tables(rows, SCORES["accuracy"])
    condition, _, table = text.partition("\n\n")
    assert condition == "**kill**"
    heading, _, first, second = (
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.split("\n")
    )
    assert (heading[:2], heading[-1]) == (["strategy", "seeds"], "updates lost")
    assert first == ["none", "5", "30.0, n = 2", "2.00 [1.50, 2.50]", "–"]
    assert second == [r"a\|b", "4", "–", "1.00 [0, 2.50]", "7 [3, 11]"]


def test_of_many_faults_a_description_tells_the_first_three() -> None:
    record = Record(tuple(toy_events("chain", "kill")))
    found = outcome(record, load_prices())
    [struck] = found.faults
    assert isinstance(struck, FaultTimes)
    for count, more in ((3, ""), (4, "1 more faults"), (7, "4 more faults")):
        faults = tuple(replace(struck, fault=n, node=f"server-{n}") for n in range(count))
        note = trial_note(record, replace(found, faults=faults))
        assert re.findall(r"server-\d+ was", note) == [f"server-{n} was" for n in range(3)]
        assert "".join(re.findall(r"\d+ more faults", note)) == more
