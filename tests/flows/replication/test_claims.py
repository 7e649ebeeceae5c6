"""Claims and their verdicts, charts, and how findings are handed over."""

from __future__ import annotations

import csv
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flows.analysis.statistics import Interval
from flows.replication.charts import Chart, Dot
from flows.replication.claims import Claim, Measurement, judged, told
from flows.replication.findings import Findings, Table
from flows.replication.verdicts import Verdicts, read_verdicts

# Mean 0.1 and standard error 0.03 over six seeds: 0.02 to 0.18 at 95%, −0.04 to 0.24 at 99.5%.
SIX = [0.1 + 0.03 * step for step in (-(15**0.5), 0, 0, 0, 0, 15**0.5)]


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ({"least": 0.0}, "holds"),
        ({"least": 0.05}, "not resolved"),
        ({"least": 0.2}, "does not hold"),
        ({"most": 0.0}, "does not hold"),
        ({"least": 0.0, "most": 0.2}, "holds"),
        ({"least": 0.0, "most": 0.15}, "not resolved"),
        ({"least": 0.3, "most": 0.4}, "does not hold"),
    ],
)
def test_a_claim_is_judged_by_where_the_effect_is_shown_to_be(
    bounds: dict[str, float], verdict: str
) -> None:
    (claim,) = judged([Measurement("It costs", "–", SIX, **bounds)])  # type: ignore[arg-type]
    assert claim.verdict == verdict


def test_claims_are_judged_together_and_shown_at_the_level_of_that() -> None:
    one = Measurement("It costs", "–", SIX, least=0)
    against = Measurement("It is free", "–", SIX, most=0)
    (alone,), (first, *_) = judged([one]), judged([one] * 10)
    assert (alone.verdict, first.verdict) == ("holds", "not resolved")
    assert alone.found == "0.10 (95% interval 0.02 to 0.18; 6 seeds)"
    assert first.found == "0.10 (99.5% interval −0.04 to 0.24; 6 seeds)"
    (alone,), (first, *_) = judged([against]), judged([against] * 10)
    assert (alone.verdict, first.verdict) == ("does not hold", "not resolved"), "by the same rule"


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
        Verdicts(paper="ftps", command="dps replicate ftps", virtual=False, claims=()),
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
    assert read_verdicts(tmp_path / "verdicts.json", "ftps") == findings.verdicts
    rows = list(csv.reader((tmp_path / "figures" / "curve.csv").open()))
    assert rows[0] == ["line", "x", "y", "low", "high"]
    assert rows[1:3] == [["ours", "1", "0.5", "0.4", "0.6"], ["ours", "10", "0.7", "", ""]]
