"""Descriptions in MLflow: of an experiment what is asked and found, of a trial what happened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dps.events import TrainingStarted
from flows.analysis.groups import conditions, strategies, summarize
from flows.analysis.outcome import Outcome
from flows.analysis.statistics.claims import JudgedClaim
from flows.metrics import BY_KEY
from flows.records.record import Record
from flows.report import claims as in_words
from flows.report import sentences as words

MOST_FAULTS = 3
HOW_TO_READ = (
    "Each trial is a run; the run with the name of the experiment has the report, the figures and "
    "what is found of all trials. The step of every series is the number of gradients pushed."
)


def experiment_note(outcomes: Sequence[Outcome], judged: Sequence[JudgedClaim]) -> str:
    """Return, in Markdown, what an experiment asks, what was found, and how to read its runs."""
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
    return "\n\n".join(filter(None, [asked, found, *claims, HOW_TO_READ]))


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
    if not outcome.faults and not outcome.reason:
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
