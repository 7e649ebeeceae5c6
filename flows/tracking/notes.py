"""Descriptions in MLflow: of an experiment what is asked and found, of a trial what happened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dps.events import TrainingStarted
from flows.analysis.comparison import Compared
from flows.analysis.groups import conditions, strategies, summarize
from flows.analysis.outcome import Outcome
from flows.analysis.statistics import FEWEST_SEEDS
from flows.analysis.statistics.claims import JudgedClaim
from flows.metrics import BY_KEY, NOT_APPLICABLE, Metric
from flows.metrics.score import Score
from flows.records.record import Record
from flows.report import claims as in_words
from flows.report import sentences as words
from flows.report.terminal import figure_name

MOST_FAULTS = 3
MOST_LETTERS = 5000
BREAK = "\n\n"
TABLES_TOLD = "Mean over seeds, and in brackets the 95% interval of that, for each condition:"
MORE_TABLES = "The other conditions are in `comparison.csv`, among the artifacts."
HOW_TO_READ = (
    "Each trial is a run; the run with the name of the experiment has the report, the figures and "
    "what is found of all trials. The step of every series is the number of gradients pushed."
)


def experiment_note(
    outcomes: Sequence[Outcome],
    judged: Sequence[JudgedClaim],
    rows: Sequence[Compared] = (),
    most: int = MOST_LETTERS,
) -> str:
    """Return, in Markdown, what an experiment asks, what was found, and how to read its runs.

    Parameters
    ----------
    outcomes
        Its trials.
    judged
        Its claims.
    rows
        What its strategies are compared by: a table for each condition, of as many conditions as
        fit.
    most
        The most letters that it may have.
    """
    if not outcomes:
        return HOW_TO_READ
    seeds = sorted({o.identity.seed for o in outcomes if o.identity.seed is not None})
    facts = {
        "Strategies": strategies(outcomes),
        "Conditions": [name for name in conditions(outcomes) if name],
        "Seeds": [str(seed) for seed in seeds],
    }
    # In one line: it is all that MLflow shows until a description is unfolded.
    asked = "; ".join(f"**{what}:** {', '.join(names)}" for what, names in facts.items() if names)
    groups = [group for group in summarize(outcomes) if group.trials]
    found = " ".join(words.in_short(groups)) if groups else ""
    claims = [_claim(each) for each in judged] or [in_words.NO_CLAIMS]
    parts, rest = [asked, found, *claims], [HOW_TO_READ]
    left = most - len(_paragraphs([*parts, TABLES_TOLD, MORE_TABLES, *rest]))
    tables, fitting = comparison_tables(rows, outcomes[0].score), list[str]()
    while tables and (left := left - len(tables[0]) - len(BREAK)) >= 0:
        fitting.append(tables.pop(0))
    if fitting:
        parts += [TABLES_TOLD, *fitting, MORE_TABLES if tables else ""]
    return _paragraphs([*parts, *rest])[:most]


def comparison_tables(rows: Sequence[Compared], score: Score) -> list[str]:
    """Return a table in Markdown for each condition: strategies, and the mean of each figure."""
    tables = []
    for condition in dict.fromkeys(row.condition for row in rows):
        table = _table([row for row in rows if row.condition == condition], score)
        tables.append(f"**{condition}**{BREAK}{table}" if condition else table)
    return tables


def _table(rows: Sequence[Compared], score: Score) -> str:
    columns = {key: score.of(BY_KEY[key]) for key in dict.fromkeys(row.metric for row in rows)}
    found: dict[str, dict[str, Compared]] = {}
    for row in rows:
        found.setdefault(row.strategy, {})[row.metric] = row
    lines = [
        ["strategy", "seeds", *map(_heading, columns.values())],
        ["---", *["---:"] * (1 + len(columns))],
        *(_line(strategy, mine, columns) for strategy, mine in found.items()),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _line(
    strategy: str, rows: Mapping[str, Compared], columns: Mapping[str, Metric]
) -> Sequence[str]:
    """A strategy, the most seeds that a mean of it is of, and each figure of its `rows`."""
    seeds = max((row.interval.n for row in rows.values() if row.interval), default=0)
    cells = [_cell(rows.get(key), column, seeds) for key, column in columns.items()]
    return [strategy.replace("|", "\\|"), str(seeds), *cells]


def _heading(column: Metric) -> str:
    name = figure_name(column)
    return f"updates {name}" if column.key.startswith("updates_") else name


def _cell(row: Compared | None, column: Metric, seeds: int) -> str:
    """A mean and its interval, and of how many seeds it is, if not of all."""
    found = row.interval if row else None
    if found is None:
        return NOT_APPLICABLE
    bounds = ""
    if found.low is not None and found.high is not None and found.n >= FEWEST_SEEDS:
        low, high = column.cut(found.low), column.cut(found.high)
        bounds = f" [{column.text(low)}, {column.text(high)}]"
    partly = f", n = {found.n}" if found.n < seeds else ""
    return f"{column.text(found.mean)}{bounds}{partly}"


def _paragraphs(parts: Iterable[str]) -> str:
    return BREAK.join(filter(None, parts))


def _claim(judged: JudgedClaim) -> str:
    title, verdict = in_words.title(judged.claim, judged.score), in_words.verdict_sentence(judged)
    return f"- *{title}*: **{judged.decision.verdict}**. {verdict}"


def trial_note(record: Record, outcome: Outcome) -> str:
    """Return in one sentence which trial it is and what happened in it."""
    identity = outcome.identity
    names = [identity.strategy, identity.condition]
    seed = "" if identity.seed is None else f"seed {identity.seed}"
    which = ", ".join(filter(None, [*names, seed]))
    parts = [*_faults(record, outcome), *_end(outcome)]
    return f"{which}: {'; '.join(parts)}." if parts else f"{which}."


def _faults(record: Record, outcome: Outcome) -> Iterable[str]:
    started = record.of(TrainingStarted)
    origin = started[0].t if started else record.events[0].t
    for fault in outcome.faults[:MOST_FAULTS]:
        yield words.told(fault, origin)
    if (more := len(outcome.faults) - MOST_FAULTS) > 0:
        yield f"{more} more faults"
    if not outcome.faults and not outcome.reason and outcome.whole:
        yield "nothing failed"


def _end(outcome: Outcome) -> Iterable[str]:
    row = outcome.row()
    if not outcome.valid:
        yield f"{outcome.status}, because {outcome.reason}" if outcome.reason else outcome.status
    if row["updates_lost"]:
        yield f"{BY_KEY['updates_lost'].text(row['updates_lost'])} updates lost"
    for key in ("accuracy_final", "training_seconds"):
        if row[key] is not None:
            column = outcome.score.of(BY_KEY[key])
            unit = column.unit if column.unit == "%" else f" {column.unit}"
            yield f"{column.label} {column.text(row[key])}{unit}".rstrip()
