"""What commands write with `--json`: one document on stdout, whatever else there is on stderr.

docs/json.md names the keys of each; they are part of the interface, so they are written out here
and do not follow the fields of whatever a figure is computed with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Container

    from flows.analysis.comparison import Compared
    from flows.analysis.outcome import Outcome
    from flows.analysis.statistics import Difference
    from flows.analysis.statistics.claims import JudgedClaim, PlannedClaim
    from flows.cli.doctor import Finding
    from flows.config.trials import Trial
    from flows.execution.experiment import Ran
    from flows.monitor.status import Standing, Status
    from flows.monitor.top import Picture
    from flows.report.compare import Run
    from flows.verification.simulate import Broken, Hunt, Repeated, Simulated
    from flows.verification.validate import Agreement

AsJson = Annotated[
    bool, typer.Option("--json", help="Write one JSON document to stdout, and all else to stderr.")
]


class JsonOutput:
    """Takes the document of a command; what is written without `--json` goes nowhere."""

    def __init__(self, out: IO[str] | None) -> None:
        self._out = out

    @property
    def wanted(self) -> bool:
        """Whether a document is asked for."""
        return self._out is not None

    def write(self, document: Any) -> None:
        """Write the document: what JSON knows, data classes, paths and numbers of numpy.

        A number that is none, or infinite, becomes null.
        """
        from pydantic_core import to_json

        if self._out is not None:
            text = to_json(document, indent=2, inf_nan_mode="null", fallback=_plain).decode()
            print(text, file=self._out, flush=True)


@contextmanager
def json_output(wanted: bool) -> Iterator[JsonOutput]:
    """Give what takes the document, if one is wanted; until the end, stdout is stderr.

    So it is for the processes that are started meanwhile, where stdout is that of the process.
    """
    if not wanted:
        yield JsonOutput(None)
        return
    own = sys.stdout
    if own is not sys.__stdout__ or own is None:
        with redirect_stdout(sys.stderr):
            yield JsonOutput(own)
        return
    own.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        try:
            yield JsonOutput(out)
        finally:
            own.flush()
            os.dup2(out.fileno(), 1)


# -- parts of several documents --------------------------------------------------------------------


def trials(outcomes: Iterable[Outcome]) -> list[Mapping[str, Any]]:
    """Every figure of every trial, by its name."""
    return [outcome.row() for outcome in outcomes]


def difference(found: Difference | None) -> dict[str, Any] | None:
    """A mean difference, with its interval of 95% and p-value, neither corrected."""
    if found is None:
        return None
    return {name: getattr(found, name) for name in ("mean", "low", "high", "sd", "n", "p")}


def comparison(rows: Iterable[Compared]) -> list[dict[str, Any]]:
    """What is compared besides the claims."""
    return [
        {
            "metric": row.metric,
            "condition": row.condition,
            "strategy": row.strategy,
            "baseline": row.baseline,
            "value": row.interval,
            "difference": difference(row.difference),
            "reading": row.reading,
            "sentence": row.said,
            "seeds_needed": row.repeats_needed,
        }
        for row in rows
    ]


def claims(judged: Iterable[JudgedClaim]) -> list[dict[str, Any]]:
    """The claims that were fixed beforehand, with their verdicts."""
    return [
        {
            **each.claim.model_dump(mode="json"),
            "verdict": each.decision.verdict,
            "p": each.decision.p,
            "p_corrected": each.decision.corrected,
            "confidence": each.decision.confidence,
            "interval": each.bounds,
            "difference": difference(each.difference),
            "seeds_needed": each.needed,
            "trials": each.trials,
            "trials_before_the_claim": each.late,
        }
        for each in judged
    ]


# -- documents -------------------------------------------------------------------------------------


def results(
    experiment: str,
    outcomes: Sequence[Outcome],
    judged: Iterable[JudgedClaim],
    rows: Iterable[Compared],
) -> dict[str, Any]:
    """What is recorded of an experiment, and what it shows."""
    return {
        "experiment": experiment,
        "score": outcomes[0].score.key if outcomes else None,
        "trials": trials(outcomes),
        "claims": claims(judged),
        "comparison": comparison(rows),
    }


def run(
    experiment: str, done: Ran, judged: Iterable[JudgedClaim], rows: Iterable[Compared]
) -> dict[str, Any]:
    """What a run leaves behind."""
    return {
        **results(experiment, done.outcomes, judged, rows),
        "report": done.report,
        "tracked": done.tracked,
        "refused_by_tracking": done.refused,
    }


def plan(
    experiment: str,
    planned: Iterable[Trial],
    recorded: Container[str],
    seconds: float,
    warnings: Sequence[str],
    resolved: Iterable[PlannedClaim],
) -> dict[str, Any]:
    """The trials of an experiment in the order in which they run, and what its seeds resolve."""
    from flows.config.faults.text import full

    return {
        "experiment": experiment,
        "trials": [
            {
                "trial": trial.name,
                "labels": trial.labels,
                "seed": trial.seed,
                "digest": trial.digest,
                "nodes": trial.config.node_names,
                "faults": full(trial.config.build_faults()),
                "recorded": trial.name in recorded,
            }
            for trial in planned
        ],
        "seconds": seconds,
        "warnings": warnings,
        "claims": [
            {
                **each.claim.model_dump(mode="json"),
                "sd": each.sd,
                "pilot_seeds": each.pilot_seeds,
                "level": each.level,
                "power": each.power,
                "seeds_needed": each.needed,
            }
            for each in resolved
        ],
    }


def status(statuses: Iterable[Status]) -> list[dict[str, Any]]:
    """How it stands with experiments; `owner` is null for one that does not run."""
    return [
        {
            "experiment": each.experiment,
            "owner": each.owner,
            "command": each.command,
            "trials": [_standing(trial) for trial in each.trials],
        }
        for each in statuses
    ]


def compare(runs: Sequence[Run], rows: Iterable[Compared]) -> dict[str, Any]:
    """Runs side by side; the others are compared with the first."""
    from flows.report.compare import settings_that_differ

    return {
        "runs": [
            {"name": run.name, "trials": trials(done.outcome for done in run.trials)}
            for run in runs
        ],
        "settings": settings_that_differ(*runs),
        "comparison": comparison(rows),
    }


def doctor(findings: Sequence[Finding]) -> dict[str, Any]:
    """What was looked at, and whether experiments can run with it."""
    return {
        "ok": all(each.good for each in findings),
        "findings": [
            {"subject": each.subject, "message": each.found, "ok": each.good} for each in findings
        ],
    }


def agreement(found: Agreement, said: Sequence[str]) -> dict[str, Any]:
    """How an experiment on real nodes and its twin on virtual time agree."""
    return {
        "figures": [
            {
                "metric": pair.metric,
                "condition": pair.condition,
                "strategy": pair.strategy,
                "real": pair.real,
                "virtual": pair.virtual,
                "error": pair.error,
                "within_spread": pair.within_spread,
                "difference": difference(pair.difference),
            }
            for pair in found.pairs
        ],
        "claims": [
            dict(zip(("real", "virtual"), claims(both), strict=True)) for both in found.claims
        ],
        "readings": [
            {
                "comparison": each.about,
                "relation": each.relation,
                "enough_seeds": each.can_be_told,
            }
            for each in found.readings
        ],
        "left_out": dict(zip(("real", "virtual"), found.left_out, strict=True)),
        "verdict": said,
    }


def top(pictures: Iterable[Picture]) -> list[dict[str, Any]]:
    """Trainings as they run."""
    return [
        {
            "name": each.name,
            "state": each.state,
            "time": each.t,
            "updates": each.updates,
            "total_updates": each.of,
            "shards": each.shards,
            "workers": each.workers,
            "lost": each.lost,
            "recent": [{"time": event.t, "message": event.said} for event in each.recent],
        }
        for each in pictures
    ]


def simulated(done: Simulated | Repeated | Hunt) -> dict[str, Any]:
    """What came of schedules on virtual time, of one of them, or of the broken variants."""
    from flows.verification.simulate import Hunt, Simulated

    found = {field.name: getattr(done, field.name) for field in fields(done)}
    match done:
        case Simulated():
            cases = {
                name: {
                    "schedules": totals.schedules,
                    "operations": totals.operations,
                    "faults": totals.faults,
                    "violations": [_violation(each) for each in totals.broken],
                }
                for name, totals in done.cases.items()
            }
            violations = [_violation(each) for each in done.violations]
            return {**found, "violations": violations, "cases": cases}
        case Hunt():
            variants = [
                {
                    "variant": each.variant,
                    "schedules": each.after,
                    "schedule": each.schedule,
                    "violation": each.said,
                }
                for each in done.variants
            ]
            return {"variants": variants, "not_caught": done.missed, "seconds": done.seconds}
    return found


# -- parts -----------------------------------------------------------------------------------------


def _violation(broken: Broken) -> dict[str, Any]:
    return {
        "schedule": broken.schedule,
        "violation": broken.what,
        "shrunk": broken.shrunk,
        "description": broken.words,
    }


def _standing(trial: Standing) -> dict[str, Any]:
    going = trial.going
    return {
        "trial": trial.trial,
        "state": trial.state,
        "reason": trial.reason,
        "since": going and going.since,
        "last_event_at": going and going.heard,
        "updates": going and going.updates,
        "total_updates": going and going.of,
        "message": going and going.told,
        "dashboard": going and going.dashboard,
    }


def _plain(value: Any) -> Any:
    """What JSON does not know by itself: numbers and arrays of numpy."""
    tolist = getattr(value, "tolist", None)
    return str(value) if tolist is None else tolist()
