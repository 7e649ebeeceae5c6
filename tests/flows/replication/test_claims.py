"""Claims and their verdicts, charts, and how findings are handed over."""

from __future__ import annotations

import csv
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flows.analysis.statistics import Interval
from flows.replication.charts import Chart, Dot
from flows.replication.claims import Claim, Measurement, judge, judged, told
from flows.replication.findings import Findings, Table


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.1, 0.3, "holds"),
        (-0.1, 0.3, "not resolved"),
        (-0.3, -0.1, "does not hold"),
        (0.0, 0.0, "does not hold"),
        (None, None, "not resolved"),
    ],
)
def test_a_claim_is_judged_by_where_its_whole_interval_is(
    low: float | None, high: float | None, verdict: str
) -> None:
    assert judge(Interval(0.1, low, high, 5), least=0) == verdict


def test_a_claim_may_have_two_bounds() -> None:
    assert judge(Interval(2, 1.5, 2.5, 5), least=1, most=3) == "holds"
    assert judge(Interval(2, 1.5, 3.5, 5), least=1, most=3) == "not resolved"
    assert judge(Interval(4, 3.5, 4.5, 5), least=1, most=3) == "does not hold"
    assert judge(Interval(2, 1.5, 2.5, 2), least=1, most=3) == "not resolved"


def test_claims_are_judged_together_but_shown_with_intervals_of_95_percent() -> None:
    # Mean 0.1, standard error 0.03: 0.02 to 0.18 at 95%, and −0.04 to 0.24 at 99.5%.
    values = [0.1 + 0.03 * step for step in (-(15**0.5), 0, 0, 0, 0, 15**0.5)]
    one = Measurement("It costs", "–", values, least=0)
    (alone,), (first, *_) = judged([one]), judged([one] * 10)
    assert (alone.verdict, first.verdict) == ("holds", "not resolved")
    assert alone.found == first.found
    assert first.found == "0.10 (95% interval 0.02 to 0.18; 6 seeds)"


@pytest.mark.parametrize(("n", "verdict"), [(3, "not resolved"), (5, "not resolved"), (6, "holds")])
def test_few_equal_values_resolve_nothing(n: int, verdict: str) -> None:
    (claim,) = judged([Measurement("It costs", "–", [4.0] * n, most=5)])
    assert claim.verdict == verdict


def test_a_claim_without_values_or_against_which_something_speaks() -> None:
    nothing = Measurement("It costs", "–", [], least=0)
    against = Measurement("Only that", "–", [1.0] * 9, least=0, note="; 2 others", refuted=True)
    claims = judged([nothing, against])
    assert [claim.verdict for claim in claims] == ["not resolved", "does not hold"]
    assert claims[0].found == "nothing to judge by"
    assert claims[1].found.endswith("; 2 others")


def test_an_effect_is_told_with_its_interval() -> None:
    effect = Interval(-0.5, -0.75, 0.25, 4)
    assert told(effect, " points") == "−0.50 points (95% interval −0.75 to 0.25; 4 seeds)"
    assert told(Interval(3, None, None, 1), "", 1) == "3.0 (one seed)"


@pytest.fixture
def findings() -> Findings:
    dots = [Dot(1, 0.5, 0.4, 0.6), Dot(10, 0.7)]
    chart = Chart(
        "curve", "A curve.", "x", "y", {"ours": dots, "theirs": dots[:1]}, logarithmic=True
    )
    return Findings(
        "A <replication>",
        ["What was done."],
        [Claim("It is faster", "2", "1 (95% interval 0 to 2; 3 seeds)", "not resolved")],
        [Table("Numbers", ("a", "b"), [("1", "2 | 3")])],
        [chart],
    )


def test_findings_are_a_page_a_text_and_figures_with_their_points(
    findings: Findings, tmp_path: Path
) -> None:
    page = findings.write(tmp_path).read_text()
    assert "A &lt;replication&gt;" in page
    assert page.count("<svg") == 1
    assert "http://" not in page.replace("http://www.w3.org/", "")
    text = (tmp_path / "findings.md").read_text()
    assert "| It is faster | 2 | 1 (95% interval 0 to 2; 3 seeds) | not resolved |" in text
    assert "| 1 | 2 \\| 3 |" in text
    assert "![A curve.](figures/curve.svg)" in text
    ElementTree.parse(tmp_path / "figures" / "curve.svg")
    rows = list(csv.reader((tmp_path / "figures" / "curve.csv").open()))
    assert rows[0] == ["line", "x", "y", "low", "high"]
    assert rows[1:3] == [["ours", "1", "0.5", "0.4", "0.6"], ["ours", "10", "0.7", "", ""]]
