"""Caveats on the figures: missing values, and whether times are reliable."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from flows.metrics import BY_KEY
from flows.metrics.metric import Value
from flows.metrics.outcome import REAL, Outcome
from flows.quoting import first_few
from flows.records.owner import at_work
from flows.records.record import command_of, trial_names

NO_CONTROL = "it has no control"
MAX_SPREAD = 0.1  # coefficient of variation of the pace; on a quiet machine it is 1 to 3%


def why_unknown(outcome: Outcome, key: str) -> str:
    """Return the reason why a figure of a trial is unknown, or "" if it is known."""
    if not outcome.valid:
        return f"it is {outcome.status}"
    if BY_KEY[key].whole and not outcome.whole:
        return "it was resumed"
    if BY_KEY[key].of_effects and outcome.effects.control is None:
        return outcome.effects.lacking or NO_CONTROL
    return ""


def without_effect(outcomes: Sequence[Outcome]) -> str:
    """Describe which trials with faults have an unknown effect, and why; "" if none has."""
    valid = [each for each in outcomes if each.valid and (each.faults or each.effects.lacking)]
    lacking = [each for each in valid if each.effects.lacking]
    if not lacking:
        return ""
    named = [f"{each.identity.trial} ({each.effects.lacking})" for each in lacking]
    text = (
        f"The effect of the faults is unknown for {len(lacking)} of {len(valid)} valid trials: "
        f"{first_few(named)}."
    )
    if any(each.effects.lacking == NO_CONTROL for each in lacking):
        text += (
            " A control is a valid trial with the same settings and seed and an empty fault plan. "
            "The label “no fault: []” on an axis of faults adds one for each trial."
        )
    return text


def short_of_target(outcomes: Sequence[Outcome]) -> str:
    """Describe how many trials reached the target of the score; "" if all did, or there is none."""
    rows = [each.row() for each in outcomes if each.valid and each.whole]
    aimed = [row for row in rows if row["target_accuracy"] is not None]
    reached = sum(row["target_seconds"] is not None for row in aimed)
    if reached == len(aimed):
        return ""
    score = outcomes[0].score
    targets = {score.format(target) for target in _numbers(aimed, "target_accuracy")}
    best = score.best(_numbers(aimed, "accuracy_best"))
    seen = "" if best is None else f"; the best evaluation was {score.format(best)}"
    return (
        f"{reached or 'None'} of {len(aimed)} valid trials reached the target, {score.name} of "
        f"{' or '.join(sorted(targets))}{seen}."
    )


def remedies_in(folder: Path, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return what can be done about trials that do not count, a command for each kind.

    The command is that by which the experiment in `folder` was run last. While it runs, nothing is
    missing.

    Raises `ConfigurationError` if the list of trials is damaged.
    """
    recorded = [each.identity.trial for each in outcomes]
    planned, command = recorded if at_work(folder) else trial_names(folder), command_of(folder)

    def named(status: str) -> list[str]:
        return [each.identity.trial for each in outcomes if each.status == status]

    resumed = [each.identity.trial for each in outcomes if each.valid and not each.whole]
    kinds = (
        ("missing or damaged", [name for name in planned if name not in recorded], ""),
        ("failed", named("failed"), ""),
        ("invalid", named("invalid"), " --retry-invalid"),
        ("resumed, so figures of the whole training are missing", resumed, " --no-resume"),
    )
    return tuple(
        f"{first_few(names)} ({len(names)} of {len(planned)} trials): {what}; to run "
        f"{'it' if len(names) == 1 else 'them'} again: {command}{option}"
        for what, names, option in kinds
        if names
    )


def _numbers(rows: Iterable[Mapping[str, Value]], key: str) -> list[float]:
    return [float(value) for row in rows if (value := row[key])]


# -- whether times and money can be relied on, and compared ----------------------------------


def spread_of_pace(outcomes: Sequence[Outcome]) -> float | None:
    """Return by how much controls differ in pace from seed to seed: standard deviation over mean.

    That is the root mean square over strategies and conditions without faults; None where none has
    two seeds.
    """
    paces: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for each in outcomes:
        if each.valid and not each.faults:
            place = each.identity.strategy, each.identity.condition
            paces[place] += _numbers([each.row()], "gradients_together")
    groups = [np.array(group) / np.mean(group) for group in paces.values() if len(group) > 1]
    if not groups:
        return None
    squares = sum(float(np.square(group - 1).sum()) for group in groups)
    return math.sqrt(squares / sum(len(group) - 1 for group in groups))


def unquiet(outcomes: Sequence[Outcome]) -> str:
    """Describe why times and money of trials are unreliable; "" if the machine was quiet."""
    real = [each for each in outcomes if not each.virtual]
    reasons = []
    spread = spread_of_pace(real)
    if spread is not None and spread > MAX_SPREAD:
        reasons.append(f"the pace of trials without faults varied by {spread:.0%} between seeds")
    if busy := [each.row() for each in real if each.overloaded]:
        loads = _numbers(busy, "load_average")  # not known of resumed trials
        most = f", at a load average of up to {max(loads):.0f}" if loads else ""
        reasons.append(f"{len(busy)} of {len(real)} trials wanted more cores than there are{most}")
    if not reasons:
        return ""
    return (
        f"The machine was not quiet: {', and '.join(reasons)}. Do not rely on times and money; "
        "rerun the trials on an idle machine"
    )


def time_basis(profiles: Sequence[str]) -> str:
    """Describe whether trials ran on real or virtual time; "" if all ran on real nodes.

    If they differ, warn that times, money and use cannot be compared.
    """
    names = sorted(set(profiles))
    if names == [REAL] or not names:
        return ""
    if len(names) == 1:
        return f"virtual, with the profile {names[0]}: times, money and use are model output"
    each = [
        f"{profiles.count(name)} "
        + (f"on virtual time with the profile {name}" if name else "on real nodes")
        for name in names
    ]
    return f"not the same: {', '.join(each)}; do not compare times, money and use between them"
