"""What statistics lack: trials and effects that do not count, why, and the command to run again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from flows.analysis.outcome import Outcome
from flows.metrics import BY_KEY
from flows.metrics.effects import EFFECTS
from flows.quoting import first_few
from flows.records.owner import at_work
from flows.records.record import command_of, trial_names

NO_CONTROL = "it has no control"
RESUMED = "resumed, so that figures of the whole training are missing"
_EFFECTS = frozenset(metric.key for metric in EFFECTS)


def why_unknown(outcome: Outcome, key: str) -> str:
    """Return the reason why a figure of a trial is unknown, or "" if it is known."""
    if not outcome.valid:
        return f"it is {outcome.status}"
    if BY_KEY[key].whole and not outcome.whole:
        return "it was resumed"
    if key in _EFFECTS and outcome.effects.control is None:
        return outcome.effects.lacking or NO_CONTROL
    return ""


def without_effect(outcomes: Sequence[Outcome]) -> str:
    """Say for which trials with faults their effect is unknown, and why; "" where for none."""
    valid = [each for each in outcomes if each.valid and (each.faults or each.effects.lacking)]
    lacking = [each for each in valid if each.effects.lacking]
    if not lacking:
        return ""
    named = [f"{each.identity.trial} ({each.effects.lacking})" for each in lacking]
    told = (
        f"The effect of the faults is unknown for {len(lacking)} of {len(valid)} valid trials: "
        f"{first_few(named)}."
    )
    if any(each.effects.lacking == NO_CONTROL for each in lacking):
        told += (
            " A control is a valid trial that is the same, seed included, but for an empty fault "
            "plan. An axis of faults with “no fault: []” makes one of each."
        )
    return told


def short_of_target(outcomes: Sequence[Outcome]) -> str:
    """Say how many trials reached the target of the score; "" where all did, or there is none."""
    aimed = [e for e in outcomes if e.valid and e.whole and e.target.accuracy is not None]
    reached = sum(each.target.seconds is not None for each in aimed)
    if reached == len(aimed):
        return ""
    score = aimed[0].score
    targets = {score.text(each.target.accuracy) for each in aimed if each.target.accuracy}
    best = score.best(e.accuracy.best for e in aimed if e.accuracy.best is not None)
    seen = "" if best is None else f"; the best evaluation was {score.text(best)}"
    return (
        f"{reached or 'None'} of {len(aimed)} valid trials reached the target, {score.name} of "
        f"{' or '.join(sorted(targets))}{seen}."
    )


def remedies(
    outcomes: Sequence[Outcome], planned: Collection[str], command: str
) -> tuple[str, ...]:
    """Return what can be done about trials that do not count, a command for each kind.

    Parameters
    ----------
    outcomes
        The recorded trials.
    planned
        The names of all trials of the experiment.
    command
        The command line that runs it.
    """
    recorded = {each.identity.trial for each in outcomes}
    named = {
        "missing or damaged": [name for name in planned if name not in recorded],
        "failed": [each.identity.trial for each in outcomes if each.status == "failed"],
        "invalid": [each.identity.trial for each in outcomes if each.status == "invalid"],
        RESUMED: [each.identity.trial for each in outcomes if each.valid and not each.whole],
    }
    options = {"invalid": " --retry-invalid", RESUMED: " --no-resume"}
    return tuple(
        f"{first_few(names)} ({len(names)} of {len(planned)} trials): {what}; to run "
        f"{'it' if len(names) == 1 else 'them'} again: {command}{options.get(what, '')}"
        for what, names in named.items()
        if names
    )


def remedies_in(folder: Path, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the remedies for an experiment whose trials are in a folder, as it was run last.

    While it runs, nothing is missing.

    Raises
    ------
    ConfigurationError
        The list of trials is damaged.
    """
    recorded = [each.identity.trial for each in outcomes]
    planned = recorded if at_work(folder) else trial_names(folder)
    return remedies(outcomes, planned, command_of(folder))
