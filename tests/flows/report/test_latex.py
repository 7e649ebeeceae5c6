"""Tables as LaTeX: balanced, escaped, n and interval in captions, numbers of the outcomes."""

from __future__ import annotations

import re
import shutil
import subprocess
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
from tests.flows.report.figures.support import labelled, trials
from tests.support.synthetic import unsure_trials

SPECIALS = re.compile(r"(?<!\\)[&%#_]")


@pytest.fixture(scope="module")
def tables() -> dict[str, LatexTable]:
    outcomes = [outcome for _, outcome in trials()]
    return {table.name: table for table in latex_tables(outcomes, ComparisonSection())}


def check(text: str) -> None:
    """Check what a compiler would stumble over: environments, braces, columns, bare specials."""
    opened = list[str]()
    for kind, name in re.findall(r"\\(begin|end)\{(\w+\*?)\}", text):
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
    [found] = re.findall(r"\\begin\{tabular\}\{((?:p\{\d+pt\})?\w+)\}", text)
    columns = re.sub(r"\{\d+pt\}", "", found)
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
    assert first.rows[0][1] == "more, by 1 point"
    assert first.rows[0][2].endswith("points"), "a difference of two shares"
    assert first.rows[0][4] == judged.decision.verdict
    margin = claim.model_copy(update={"direction": "equivalent", "smallest": 0.02})
    assert latex_tables(outcomes, ComparisonSection(), (margin,))[0].rows[0][1] == "within 2 points"
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


def wide(strategies: int) -> LatexTable:
    mean = "0.000131 [0.000130, 0.000132]"
    row = ["effect at the end, same gradients, and what a long name still says, points"]
    headings = ("", *(f"async strategy {n}" for n in range(strategies)))
    return LatexTable(
        "wide", "Wide", headings, [[*row, *[mean] * strategies], [], ["a", *["0"] * strategies]]
    )


def test_a_table_is_as_wide_as_it_has_to_be() -> None:
    narrow, both, stacked = (wide(n).latex() for n in (1, 3, 5))
    for text in (narrow, both, stacked):
        check(text)
    assert narrow.startswith("\\begin{table}\n")
    assert both.startswith("\\begin{table*}\n")
    assert "0.000131 {[}0.000130, 0.000132{]}" in both
    assert "0.000131 & 0.000131" in stacked
    assert " & {[}0.000130, 0.000132{]} & {[}" in stacked
    assert r"\raggedright effect at the end" in stacked


def test_many_strategies_are_shared_out_to_several_tables() -> None:
    named = [
        labelled(each, {"recovery": f"s{n}", "faults": "kill"}, seed, 0.9)[1]
        for n in range(7)
        for seed, each in enumerate(trials(("none",), ("kill",), (0, 1, 2)))
    ]
    tables = {table.name: table for table in latex_tables(named, ComparisonSection())}
    first, second = (tables[f"kill-accuracy-{n}"] for n in (1, 2))
    assert (len(first.headings), len(second.headings)) == (6, 3)
    assert first.caption.endswith("part 1 of 2.")


@pytest.mark.skipif(
    shutil.which("kpsewhich") is None
    or subprocess.run(["kpsewhich", "booktabs.sty"], capture_output=True).returncode != 0,
    reason="needs pdflatex and booktabs (Debian: texlive-latex-recommended)",
)
def test_every_table_compiles_and_is_no_wider_than_a_page(
    tables: dict[str, LatexTable], tmp_path: Path
) -> None:
    text = [*(table.latex() for table in tables.values()), *(wide(n).latex() for n in (1, 3, 5))]
    body = "\\clearpage\n".join(text)
    document = "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n"
    (tmp_path / "all.tex").write_text(f"{document}{body}\\end{{document}}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert ran.returncode == 0, ran.stdout[-2000:]
    assert "Overfull" not in ran.stdout
    assert "Float too large" not in ran.stdout


def test_files_are_written_whole_or_it_is_said_why(tmp_path: Path) -> None:
    outcomes = [outcome for _, outcome in trials(("none",), ("kill",), (0,))]
    paths = write_latex(outcomes, ComparisonSection(), (), tmp_path / "paper")
    assert paths
    for path in paths:
        assert path.read_text().startswith("% needs \\usepackage{booktabs}\n\\begin{table}")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="cannot be written"):
        write_latex(outcomes, ComparisonSection(), (), tmp_path / "file" / "sub")
