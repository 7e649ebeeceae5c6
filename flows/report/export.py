"""Comparisons for other programs: one schema, as CSV and as JSON.

A row is a metric of a strategy (or run) under a condition, with its mean and interval, its
difference from the baseline, and what that shows; or a claim, with its verdict. Numbers are plain:
shares between 0 and 1, seconds, bytes, USD; those of a loss or an error in its own unit, which is
empty.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from flows.analysis.comparison import Compared
from flows.analysis.outcome import labels_told
from flows.analysis.statistics import CONFIDENCE
from flows.analysis.statistics.claims import JudgedClaim
from flows.metrics import BY_KEY, Metric
from flows.metrics.score import ACCURACY, Score
from flows.report import claims as in_words

SCHEMA = "dps.comparison/1"
# What numbers are in, by the unit in which tables show them.
UNITS: Mapping[str, str] = {
    "%": "fraction",
    "points": "fraction",
    "point-seconds": "fraction seconds",
    "s": "seconds",
    "MB": "bytes",
    "per second": "1/second",
}


@dataclass(frozen=True, slots=True)
class ExportedRow:
    """One row of the schema; None where there is nothing to tell.

    Attributes
    ----------
    kind
        "metric" or "claim".
    condition, strategy, baseline, metric, unit
        What is told: `baseline` is what the difference is from; None for the baseline itself, and
        for a claim about one strategy alone.
    score
        What the models are scored by: figures with accuracy in their key are of it. None where runs
        side by side have different ones.
    n, mean, low, high
        Of the strategy's own values: how many seeds, their mean and its 95% interval. None for a
        claim.
    pairs, difference, difference_low, difference_high, level
        Over so many seeds, the mean difference and its interval, of that level.
    p
        Of the difference: by itself; of a claim, after the correction for all claims.
    verdict
        "higher", "lower", "unclear", "too few seeds" or "not comparable", which is exploratory; of
        a claim, "holds", "does not hold" or "not resolved".
    claim
        What was claimed, in words.
    """

    kind: Literal["metric", "claim"]
    condition: str
    strategy: str
    baseline: str | None
    metric: str
    score: str | None
    unit: str
    n: int | None
    mean: float | None
    low: float | None
    high: float | None
    pairs: int | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    level: float | None
    p: float | None
    verdict: str | None
    claim: str | None


FIELDS = tuple(field.name for field in fields(ExportedRow))


def exported(
    rows: Sequence[Compared], claims: Sequence[JudgedClaim] = (), score: Score | None = ACCURACY
) -> tuple[ExportedRow, ...]:
    """Return the claims, then what was compared, as rows.

    `score` is what models are scored by; None where that differs.
    """
    return (*map(_of_claim, claims), *(_of_metric(row, score) for row in rows))


def to_csv(rows: Sequence[ExportedRow]) -> str:
    """Return CSV with a header and a line for each row; empty where there is nothing to tell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


def to_json(
    rows: Sequence[ExportedRow], runs: Sequence[str], settings: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return a JSON object: the schema, the runs, the settings that differ, and the rows."""
    told = {
        "schema": SCHEMA,
        "runs": list(runs),
        **({"settings": list(settings)} if len(runs) > 1 else {}),
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False)


def _of_metric(row: Compared, score: Score | None) -> ExportedRow:
    own, found = row.interval, row.difference
    return ExportedRow(
        kind="metric",
        condition=row.condition,
        strategy=row.strategy,
        baseline=row.baseline if row.strategy != row.baseline else None,
        metric=row.metric,
        score=score.key if score else None,
        unit=_unit((score or ACCURACY).of(BY_KEY[row.metric])),
        n=own.n if own else None,
        mean=own.mean if own else None,
        low=own.low if own else None,
        high=own.high if own else None,
        pairs=found.n if found else None,
        difference=found.mean if found else None,
        difference_low=found.low if found else None,
        difference_high=found.high if found else None,
        level=CONFIDENCE if found and found.low is not None else None,
        p=found.p if found else None,
        verdict=row.reading,
        claim=None,
    )


def _of_claim(judged: JudgedClaim) -> ExportedRow:
    claim, found = judged.claim, judged.difference
    low, high = judged.bounds or (None, None)
    return ExportedRow(
        kind="claim",
        condition=labels_told(claim.condition),
        strategy=claim.strategy,
        baseline=None if claim.one_sample else claim.baseline,
        metric=claim.metric,
        score=judged.score.key,
        unit=_unit(judged.column),
        n=None,
        mean=None,
        low=None,
        high=None,
        pairs=found.n if found else None,
        difference=found.mean if found else None,
        difference_low=low,
        difference_high=high,
        level=judged.decision.confidence if low is not None else None,
        p=judged.decision.corrected,
        verdict=judged.decision.verdict,
        claim=in_words.title(claim, judged.score),
    )


def _unit(metric: Metric) -> str:
    return UNITS.get(metric.unit, metric.unit)
