"""The comparison tables as LaTeX, for a paper: booktabs, escaped, how many and which interval said.

Each table is a file of its own, a `table` environment with a caption and a label, to be read by
`\\input`; the preamble needs `\\usepackage{booktabs}`. One that is wider than a column of text is a
`table*`, which goes over both columns of a page, and no wider than these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from flows.metrics.score import Score
from flows.report import claims as in_words
from flows.report.figures.figure import slugs
from flows.report.figures.style import count_told
from flows.report.tables import COMPARED, score_of_groups

# Points of a text in `article`, and of both columns of a journal's page.
COLUMN, PAGE = 345, 505
LEAST_NAME, LEAST_SENTENCE = 110, 150  # points
COLUMN_SEP = 4  # points on each side of a column
MOST_ACROSS = 5  # strategies side by side in one table
MOST_DOWN, MOST_METRICS = 40, 24  # lines, and metrics with an interval under each mean
SIZE = r"\footnotesize"
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
_NARROW = frozenset(" .,;:[]()ilj|'")
_INTERVAL = re.compile(r"(\S+) (\[.*)")


@dataclass(frozen=True, slots=True)
class LatexTable:
    """A table as text that is not escaped yet: rows of cells under headings; the first is a name.

    An empty row is a thin rule. `align` has an "l" or "r" for each column; else all but the first
    are on the right. Names have `least` points at least, and are broken where they need more than
    there is.
    """

    name: str
    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str = ""
    least: int = LEAST_NAME

    def latex(self) -> str:
        """Return the `table` environment."""
        lines = self.rows
        if self._room(lines, PAGE) < self.least:
            lines = [line for row in lines for line in (_under_each_other(row) if row else [row])]
        names = max(map(_points, self._column(lines, 0)))
        narrow = self._room(lines, COLUMN)
        wide = narrow < min(names, self.least)
        room = max(self.least, self._room(lines, PAGE) if wide else narrow)
        broken = names > room
        align = self.align or "l" + "r" * (len(self.headings) - 1)
        kind = "table*" if wide else "table"
        return "\n".join(
            [
                rf"\begin{{{kind}}}",
                r"\centering",
                rf"\caption{{{escaped(self.caption)}}}",
                rf"\label{{tab:{self.name}}}",
                r"\smallskip",
                SIZE,
                rf"\setlength{{\tabcolsep}}{{{COLUMN_SEP}pt}}",
                *([r"\makebox[\linewidth]{%"] if wide else []),
                rf"\begin{{tabular}}{{{f'p{{{room:.0f}pt}}' if broken else 'l'}{align[1:]}}}",
                r"\toprule",
                _row(self.headings),
                r"\midrule",
                *(_line(row, broken) for row in lines),
                r"\bottomrule",
                rf"\end{{tabular}}{'}' if wide else ''}",
                rf"\end{{{kind}}}",
                "",
            ]
        )

    def _room(self, rows: Sequence[Sequence[str]], width: int) -> float:
        """How wide the names may be in a table of some width, in points."""
        columns = range(1, len(self.headings))
        others = sum(max(map(_points, self._column(rows, place))) for place in columns)
        return width - others - 2 * COLUMN_SEP * len(self.headings)

    def _column(self, rows: Sequence[Sequence[str]], place: int) -> list[str]:
        return [self.headings[place], *(row[place] for row in rows if row)]


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
    tables, score = list[LatexTable](), score_of_groups(groups)
    if claims:
        tables.append(_claims(judge(outcomes, claims, np.random.default_rng(0)), score))
    for condition in conditions:
        slug = named[condition or "all"]
        judged = [row for row in rows if row.condition == condition]
        if judged:
            tables += _differences(judged, slug, score)
        members = [group for group in groups if group.condition == condition]
        for title, keys in COMPARED.items():
            tables += _means(members, title, keys, slug)
    return tuple(tables)


def run_tables(rows: Sequence[Compared], score: Score) -> tuple[LatexTable, ...]:
    """Return tables of runs side by side, one for each condition: means, differences, p."""
    tables = list[LatexTable]()
    named = slugs(list(dict.fromkeys(row.condition or "all" for row in rows)))
    for condition in dict.fromkeys(row.condition for row in rows):
        members = [row for row in rows if row.condition == condition]
        lines = list[Sequence[str]]()
        for metric in dict.fromkeys(row.metric for row in members):
            found = [_beside(row, score) for row in members if row.metric == metric]
            lines += [*([[]] if lines else []), found[0], *(["", *row[1:]] for row in found[1:])]
        counts = [row.interval.n for row in members if row.interval] or [0]
        caption = (
            f"Runs side by side{_under(condition)}, {count_told(counts)}: mean and mean difference "
            f"from {rows[0].baseline}, seed by seed, each with its 95% interval in brackets, and "
            "p by itself; nothing is corrected for the number of comparisons."
        )
        headings = ("", "run", "mean", "difference", "p", "reading")
        name = f"{named[condition or 'all']}-runs"
        tables.append(LatexTable(name, caption, headings, lines, "llrrrl"))
    return tuple(tables)


def _beside(row: Compared, score: Score) -> list[str]:
    metric, own = score.of(BY_KEY[row.metric]), row.interval
    mean = NOT_APPLICABLE
    if own is not None:
        mean = _text(metric, own.mean)
        if own.low is not None and own.high is not None and own.n >= FEWEST_SEEDS:
            mean = f"{mean} {_bounds(metric, metric.cut(own.low), metric.cut(own.high))}"
    if row.difference is None:
        return [_named(metric), row.strategy, mean, "", "", row.reading or ""]
    return [_named(metric), row.strategy, mean, *_read(row, score)[2:]]


def escaped(text: str) -> str:
    """Return text with all that LaTeX would take for something else written out."""
    return _ESCAPED.sub(lambda found: _SPECIAL[found[0]], text)


def _row(cells: Sequence[str]) -> str:
    return " & ".join(map(escaped, cells)) + r" \\"


def _line(row: Sequence[str], broken: bool) -> str:
    if not row:
        return r"\midrule"
    return (r"\raggedright " if broken and row[0] else "") + _row(row)


def _points(text: str) -> float:
    """About how wide a text is in `SIZE`."""
    return sum(2.4 if letter in _NARROW else 4.45 for letter in text)


def _under_each_other(row: Sequence[str]) -> list[Sequence[str]]:
    """A row of means with intervals as two."""
    parts = [_INTERVAL.fullmatch(cell) for cell in row]
    above = [found[1] if found else cell for found, cell in zip(parts, row, strict=True)]
    return [above, [found[2] if found else "" for found in parts]] if any(parts) else [row]


def _means(groups: Sequence[Group], title: str, keys: Sequence[str], slug: str) -> list[LatexTable]:
    """One section of the metrics, strategies side by side: as many tables as these need."""
    score = score_of_groups(groups)
    own = [key for key in keys if key not in score.same_as]
    known = [key for key in own if any(map(partial(_told, key=key), groups))]
    if not known:
        return []
    counts = count_told([len(group.trials) for group in groups])
    caption = (
        f"{score.said(title)}{_under(groups[0].condition)}: mean over the valid trials, {counts} "
        f"per strategy, with the 95% interval of the mean in brackets{_fewer(groups)}."
    )
    across = [groups[i : i + MOST_ACROSS] for i in range(0, len(groups), MOST_ACROSS)]
    down = [known[i : i + MOST_METRICS] for i in range(0, len(known), MOST_METRICS)]
    return _numbered(
        [
            LatexTable(
                f"{slug}-{_slug(title)}",
                caption,
                ("", *(group.strategy for group in part)),
                [
                    [_named(score.of(BY_KEY[key])), *(_mean(group, key) for group in part)]
                    for key in keys
                ],
            )
            for part in across
            for keys in down
        ]
    )


def _numbered(tables: Sequence[LatexTable]) -> list[LatexTable]:
    """Tell the tables that one is shared out to from each other, where there are several."""
    if len(tables) == 1:
        return list(tables)
    return [
        replace(
            each,
            name=f"{each.name}-{number}",
            caption=f"{each.caption.removesuffix('.')}; part {number} of {len(tables)}.",
        )
        for number, each in enumerate(tables, 1)
    ]


def _told(group: Group, key: str) -> bool:
    """Whether a group has a figure to tell; bytes that nobody sent or kept are not told."""
    spread = group.spread(key)
    return spread is not None and not (BY_KEY[key].unit == "MB" and spread.mean == 0)


def _mean(group: Group, key: str) -> str:
    """A mean with its interval, and of how many trials it is where not all have the metric."""
    metric = group.trials[0].score.of(BY_KEY[key])
    values = [float(value) for o in group.trials if (value := o.row()[key]) is not None]
    if not values:
        return NOT_APPLICABLE
    found = interval(values, np.random.default_rng(0))
    partly = "" if len(values) == len(group.trials) else f" (n = {len(values)})"
    if found.low is None or found.high is None or found.n < FEWEST_SEEDS:
        return _text(metric, found.mean) + partly
    bounds = _bounds(metric, metric.cut(found.low), metric.cut(found.high))
    return f"{_text(metric, found.mean)} {bounds}{partly}"


def _claims(judged: Sequence[JudgedClaim], score: Score) -> LatexTable:
    """What was claimed beforehand: each difference, its p and the verdict."""
    meant = f" {score.told}" if score.told else ""
    counts = [each.difference.n for each in judged if each.difference] or [0]
    family = f" for {len(judged)} claims (Holm)" if len(judged) > 1 else ""
    return LatexTable(
        "claims",
        f"Claims fixed beforehand, seed by seed, {count_told(counts)}: which way the difference "
        "was to go and the smallest of interest (or the margin), and its mean with its interval at "
        "the level of the verdict, 95% interval or wider, in brackets; p corrected"
        f"{family}.{meant}",
        ("", "claimed", "difference", "p", "verdict"),
        [_claim(each) for each in judged],
        "llrrl",
        LEAST_SENTENCE,
    )


def _claim(judged: JudgedClaim) -> list[str]:
    found, column = judged.difference, judged.column
    p = judged.decision.corrected
    unit = "points" if column.unit == "%" else column.shown_unit  # of a difference of two shares
    return [
        in_words.title(judged.claim, judged.score),
        in_words.claimed(judged.claim, judged.score),
        NOT_APPLICABLE
        if found is None
        else f"{_text(column, found.mean)}{_at_level(judged)} {unit}".rstrip(),
        NOT_APPLICABLE if p is None else p_text(p),
        judged.decision.verdict,
    ]


def _at_level(judged: JudgedClaim) -> str:
    found = judged.difference
    if judged.bounds is None or found is None or found.n < FEWEST_SEEDS:
        return ""
    return f" {_bounds(judged.column, *judged.bounds)}"


def _differences(rows: Sequence[Compared], slug: str, score: Score) -> list[LatexTable]:
    """What strategies are compared by: each metric's difference from the baseline, and its p."""
    parts: list[list[Sequence[str]]] = [[]]
    for metric in dict.fromkeys(row.metric for row in rows):
        found = [_read(row, score) for row in rows if row.metric == metric and row.difference]
        block = [*found[:1], *(["", *row[1:]] for row in found[1:])]
        if len(parts[-1]) + len(block) > MOST_DOWN:
            parts.append([])
        parts[-1] += [*([[]] if parts[-1] else []), *block]
    counts = [row.difference.n for row in rows if row.difference] or [0]
    baseline = rows[0].baseline
    caption = (
        f"Exploratory: differences from {baseline}{_under(rows[0].condition)}, seed by seed, "
        f"{count_told(counts)}: mean with its 95% interval in brackets, and p by itself; neither "
        f"is corrected for the {sum(row.difference is not None for row in rows)} comparisons."
    )
    headings = ("", "strategy", "difference", "p", "reading")
    return _numbered(
        [LatexTable(f"{slug}-differences", caption, headings, part, "llrrl") for part in parts]
    )


def _read(row: Compared, score: Score) -> list[str]:
    metric, found = score.of(BY_KEY[row.metric]), row.difference
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
