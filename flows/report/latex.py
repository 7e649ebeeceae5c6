"""The comparison tables as LaTeX, for a paper: booktabs, escaped, how many and which interval said.

Each table is a file of its own, a `table` environment with a caption and a label, to be read by
`\\input`; the preamble needs `\\usepackage{booktabs}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flows.analysis.comparison import Compared, compared, p_text
from flows.analysis.groups import Group, summarize
from flows.analysis.outcome import Outcome
from flows.analysis.statistics import FEWEST_SEEDS, interval
from flows.analysis.statistics.claims import JudgedClaim, judge
from flows.config.base import ComparisonSection
from flows.config.claims import ClaimSection
from flows.files import write_whole
from flows.metrics import BY_KEY, NOT_APPLICABLE, Metric
from flows.report import claims as in_words
from flows.report.figures.figure import slugs
from flows.report.figures.style import count_told
from flows.report.tables import COMPARED

NEEDED = "% needs \\usepackage{booktabs}\n"
_SPECIAL: Mapping[str, str] = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": r"{[}",  # after a line's end it would be taken for the space that follows
    "]": r"{]}",
    "*": r"{*}",
    "−": r"$-$",
    "–": r"--",
    "—": r"---",
    "“": r"``",
    "”": r"''",
    "’": r"'",
    "×": r"$\times$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "→": r"$\rightarrow$",
    "∞": r"$\infty$",
    "τ": r"$\tau$",
    "·": r"$\cdot$",
    "±": r"$\pm$",
    "…": r"\ldots{}",
    "\n": " ",
}
_ESCAPED = re.compile("|".join(map(re.escape, _SPECIAL)))


@dataclass(frozen=True, slots=True)
class LatexTable:
    """A table as text that is not escaped yet: rows of cells under headings; the first is a name.

    An empty row is a thin rule.
    """

    name: str
    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def latex(self) -> str:
        """Return the `table` environment."""
        body = [_row(row) if row else r"\midrule" for row in self.rows]
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{escaped(self.caption)}}}",
                rf"\label{{tab:{self.name}}}",
                rf"\begin{{tabular}}{{l{'r' * (len(self.headings) - 1)}}}",
                r"\toprule",
                _row(self.headings),
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )


def write_latex(
    outcomes: Sequence[Outcome],
    comparison: ComparisonSection,
    claims: Sequence[ClaimSection],
    folder: Path,
) -> tuple[Path, ...]:
    """Write the tables of an experiment into `folder`, each as a file; return where they are.

    Parameters
    ----------
    outcomes
        Of its trials; those that are not valid are left out.
    comparison
        What strategies are compared by.
    claims
        What was claimed of them beforehand.
    folder
        Made if it is not there. Files are replaced as a whole.

    Raises
    ------
    StoreUnavailable
        The folder cannot be written.
    """
    paths = []
    for table in latex_tables(outcomes, comparison, claims):
        path = folder / f"{table.name}.tex"
        write_whole(path, NEEDED + table.latex(), "a table")
        paths.append(path)
    return tuple(paths)


def latex_tables(
    outcomes: Sequence[Outcome], comparison: ComparisonSection, claims: Sequence[ClaimSection] = ()
) -> tuple[LatexTable, ...]:
    """Return the tables: claims, what is compared with the baseline, sections of all metrics."""
    groups = [group for group in summarize(outcomes) if group.trials]
    # With the same seed as the report, so that both say the same.
    rows = compared(outcomes, comparison, np.random.default_rng(0)) if groups else ()
    conditions = list(dict.fromkeys(group.condition for group in groups))
    named = slugs([condition or "all" for condition in conditions])
    tables = list[LatexTable]()
    if claims:
        tables.append(_claims(judge(outcomes, claims, np.random.default_rng(0))))
    for condition in conditions:
        slug = named[condition or "all"]
        judged = [row for row in rows if row.condition == condition]
        if judged:
            tables.append(_differences(judged, slug))
        members = [group for group in groups if group.condition == condition]
        for title, keys in COMPARED.items():
            if (table := _means(members, title, keys, slug)) is not None:
                tables.append(table)
    return tuple(tables)


def escaped(text: str) -> str:
    """Return text with all that LaTeX would take for something else written out."""
    return _ESCAPED.sub(lambda found: _SPECIAL[found[0]], text)


def _row(cells: Sequence[str]) -> str:
    return " & ".join(map(escaped, cells)) + r" \\"


def _means(
    groups: Sequence[Group], title: str, keys: Sequence[str], slug: str
) -> LatexTable | None:
    """One section of the metrics, strategies side by side; None where none applies to any."""
    known = [key for key in keys if any(group.spread(key) for group in groups)]
    if not known:
        return None
    rows = [[_named(BY_KEY[key]), *(_mean(group, key) for group in groups)] for key in known]
    counts = count_told([len(group.trials) for group in groups])
    return LatexTable(
        f"{slug}-{_slug(title)}",
        f"{title}{_under(groups[0].condition)}: mean over the valid trials, {counts} per strategy, "
        f"with the 95% interval of the mean in brackets{_fewer(groups)}.",
        ("", *(group.strategy for group in groups)),
        rows,
    )


def _mean(group: Group, key: str) -> str:
    """A mean with its interval, and of how many trials it is where not all have the metric."""
    metric = BY_KEY[key]
    values = [float(value) for o in group.trials if (value := o.row()[key]) is not None]
    if not values:
        return NOT_APPLICABLE
    found = interval(values, np.random.default_rng(0))
    partly = "" if len(values) == len(group.trials) else f" (n = {len(values)})"
    if found.low is None or found.high is None or found.n < FEWEST_SEEDS:
        return _text(metric, found.mean) + partly
    bounds = _bounds(metric, metric.cut(found.low), metric.cut(found.high))
    return f"{_text(metric, found.mean)} {bounds}{partly}"


def _claims(judged: Sequence[JudgedClaim]) -> LatexTable:
    """What was claimed beforehand: each difference, its p and the verdict."""
    counts = [each.difference.n for each in judged if each.difference] or [0]
    family = f" for {len(judged)} claims (Holm)" if len(judged) > 1 else ""
    return LatexTable(
        "claims",
        f"Claims fixed beforehand, seed by seed, {count_told(counts)}: mean difference with its "
        "interval at the level of the verdict, 95% interval or wider, in brackets; p corrected"
        f"{family}.",
        ("", "difference", "p", "verdict"),
        [_claim(each) for each in judged],
    )


def _claim(judged: JudgedClaim) -> list[str]:
    found, column = judged.difference, judged.claim.column
    p = judged.decision.corrected
    return [
        in_words.title(judged.claim),
        NOT_APPLICABLE if found is None else _text(column, found.mean) + _at_level(judged),
        NOT_APPLICABLE if p is None else p_text(p),
        judged.decision.verdict,
    ]


def _at_level(judged: JudgedClaim) -> str:
    found = judged.difference
    if judged.bounds is None or found is None or found.n < FEWEST_SEEDS:
        return ""
    return f" {_bounds(judged.claim.column, *judged.bounds)}"


def _differences(rows: Sequence[Compared], slug: str) -> LatexTable:
    """What strategies are compared by: each metric's difference from the baseline, and its p."""
    lines = list[Sequence[str]]()
    for metric in dict.fromkeys(row.metric for row in rows):
        lines += [[], *([_read(row) for row in rows if row.metric == metric and row.difference])]
    counts = [row.difference.n for row in rows if row.difference] or [0]
    baseline = rows[0].baseline
    return LatexTable(
        f"{slug}-differences",
        f"Exploratory: differences from {baseline}{_under(rows[0].condition)}, seed by seed, "
        f"{count_told(counts)}: mean with its 95% interval in brackets, and p by itself; neither "
        f"is corrected for the {sum(row.difference is not None for row in rows)} comparisons.",
        ("", "strategy", "difference", "p", "reading"),
        lines[1:],
    )


def _read(row: Compared) -> list[str]:
    metric, found = BY_KEY[row.metric], row.difference
    assert found is not None
    mean = _text(metric, found.mean)
    if found.low is not None and found.high is not None and found.n >= FEWEST_SEEDS:
        mean = f"{mean} {_bounds(metric, found.low, found.high)}"
    return [_named(metric), row.strategy, mean, row.p or NOT_APPLICABLE, row.reading or ""]


def _bounds(metric: Metric, low: float, high: float) -> str:
    return f"[{_text(metric, low)}, {_text(metric, high)}]"


def _text(metric: Metric, value: float) -> str:
    """A value as tables show it; what is rounded to 0 has no sign."""
    text = metric.text(value)
    return text.lstrip("−") if not text.strip("−0.") else text


def _named(metric: Metric) -> str:
    return f"{metric.label}, {metric.shown_unit}" if metric.shown_unit else metric.label


def _under(condition: str) -> str:
    return f", {condition}" if condition else ""


def _fewer(groups: Sequence[Group]) -> str:
    few = min(len(group.trials) for group in groups) < FEWEST_SEEDS
    return f" (none of fewer than {FEWEST_SEEDS})" if few else ""


def _slug(title: str) -> str:
    return next(iter(slugs([title]).values()))
