"""Tables as LaTeX: balanced, escaped, n and interval in captions, numbers of the outcomes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dps.errors import StoreUnavailable
from flows.analysis.groups import summarize
from flows.analysis.statistics.claims import judge
from flows.config.base import ComparisonSection
from flows.config.claims import ClaimSection
from flows.metrics import BY_KEY
from flows.report.latex import LatexTable, escaped, latex_tables, write_latex
from tests.flows.report.figures.support import trials
from tests.support.synthetic import unsure_trials

SPECIALS = re.compile(r"(?<!\\)[&%#_]")


@pytest.fixture(scope="module")
def tables() -> dict[str, LatexTable]:
    outcomes = [outcome for _, outcome in trials()]
    return {table.name: table for table in latex_tables(outcomes, ComparisonSection())}


def check(text: str) -> None:
    """Check what a compiler would stumble over: environments, braces, columns, bare specials."""
    opened = list[str]()
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert opened == []
    depth = 0
    for found in re.findall(r"\\[\\{}]|[{}]", text):
        depth += {"{": 1, "}": -1}.get(found, 0)
        assert depth >= 0
    assert depth == 0
    assert re.sub(r"\\\\|\\\$", "", text).count("$") % 2 == 0
    assert text.isascii() or not re.search(r"[−–—“”×≥≤→∞τ·±]", text)
    [columns] = re.findall(r"\\begin\{tabular\}\{(\w+)\}", text)
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(rows) >= 2
    for row in rows:
        assert len(re.findall(r"(?<!\\)&", row)) == len(columns) - 1
        assert not re.search(r"(?<!\\)[%#_]", row)
    for rule in (r"\toprule", r"\midrule", r"\bottomrule"):
        assert rule in text


def test_every_table_is_sound(tables: dict[str, LatexTable]) -> None:
    assert {
        "kill-differences",
        "kill-accuracy",
        "kill-recovery-from-the-first-fault",
        "no-fault-money",
    } <= set(tables)
    for table in tables.values():
        check(table.latex())


def test_a_caption_says_how_many_and_which_interval(tables: dict[str, LatexTable]) -> None:
    for table in tables.values():
        assert "n = 3 seeds" in table.caption
        assert "95% interval" in table.caption
        assert rf"\caption{{{escaped(table.caption)}}}" in table.latex()


def test_numbers_are_those_of_the_outcomes(tables: dict[str, LatexTable]) -> None:
    [chain] = [
        group
        for group in summarize([outcome for _, outcome in trials()])
        if (group.strategy, group.condition) == ("chain", "kill")
    ]
    spread = chain.spread("accuracy_final")
    assert spread is not None
    table = tables["kill-accuracy"]
    column = table.headings.index("chain")
    [row] = [row for row in table.rows if row[0].startswith(BY_KEY["accuracy_final"].label)]
    mean, low, high = re.fullmatch(r"([\d.]+) \[([\d.]+), ([\d.]+)\]", row[column]).groups()  # type: ignore[union-attr]
    assert mean == BY_KEY["accuracy_final"].text(spread.mean)
    assert float(low) <= float(mean) <= float(high)


def test_claims_come_first_with_verdict_and_the_rest_is_exploratory() -> None:
    claim = ClaimSection.model_validate(
        {
            "claim": "Chain & co. lose 100% less",
            "metric": "accuracy_final",
            "strategy": "chain",
            "against": "none",
            "condition": {"faults": "kill"},
            "direction": "more",
            "smallest": 0.01,
        }
    )
    outcomes = [o for _, o in unsure_trials()]
    first, *others = latex_tables(outcomes, ComparisonSection(), (claim,))
    assert first.name == "claims"
    [judged] = judge(outcomes, (claim,), np.random.default_rng(0))
    assert first.rows[0][0] == claim.claim
    assert first.rows[0][3] == judged.decision.verdict
    check(first.latex())
    [table] = [table for table in others if table.name.endswith("differences")]
    assert table.caption.startswith("Exploratory: ")
    rows = [row for row in table.rows if row]
    assert any(row[1] == "chain" and row[3:] == ["0.032", "lower"] for row in rows), rows
    check(table.latex())


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("50% of a_b & c#1", r"50\% of a\_b \& c\#1"),
        ("{x} $5 ~ ^2", r"\{x\} \$5 \textasciitilde{} \textasciicircum{}2"),
        ("a\\b", r"a\textbackslash{}b"),
        ("−3 × 2 ≥ τ → ∞", r"$-$3 $\times$ 2 $\geq$ $\tau$ $\rightarrow$ $\infty$"),
        ("“so” – it’s", r"``so'' -- it's"),
        ("<0.001", r"\textless{}0.001"),
        ("1 [0, 2]", r"1 {[}0, 2{]}"),
    ],
)
def test_what_latex_takes_for_its_own_is_escaped(text: str, latex: str) -> None:
    assert escaped(text) == latex


def test_names_of_strategies_are_escaped_in_place() -> None:
    table = LatexTable("t", "100% & more", ("", "top_k & bf16", "50%"), [["a#", "1", "2"], []])
    text = table.latex()
    check(text)
    assert r"top\_k \& bf16" in text
    assert text.count(r"\midrule") == 2
    assert SPECIALS.search(text.splitlines()[2]) is None


def test_files_are_written_whole_or_it_is_said_why(tmp_path: Path) -> None:
    outcomes = [outcome for _, outcome in trials(("none",), ("kill",), (0,))]
    paths = write_latex(outcomes, ComparisonSection(), (), tmp_path / "paper")
    assert paths
    for path in paths:
        assert path.read_text().startswith("% needs \\usepackage{booktabs}\n\\begin{table}")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="cannot be written"):
        write_latex(outcomes, ComparisonSection(), (), tmp_path / "file" / "sub")
