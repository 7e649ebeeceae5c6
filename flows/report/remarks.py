"""Remarks on the numbers: losses, missed targets, trials that do not count."""

from __future__ import annotations

from pathlib import Path

from flows.records.record import EARLIER
from flows.report.study import Study
from flows.statistics.caveats import remedies_in, short_of_target, unquiet, without_effect

MUST_BE_ZERO = ("updates_applied_twice", "updates_replica_conflicts", "updates_audit_mismatches")
MAX_LISTED = 8


def losses(study: Study) -> list[str]:
    """Return a sentence for each strategy and condition that lost updates or a whole shard."""
    found = []
    valid = study.valid
    for (condition, strategy), rows in valid.groupby(["condition", "strategy"], sort=False):
        of = f"of {len(rows)} trial{'s' * (len(rows) != 1)}"
        name = f"{strategy}, {condition}" if condition else strategy
        lost = rows["updates_lost"]
        parts = []
        if (count := int((lost > 0).sum())) > 0:
            parts.append(
                f"lost acknowledged or buffered updates in {count} {of} (mean {lost.mean():,.1f})"
            )
        if count := int((rows["recovered_from"] == "initial").sum()):
            parts.append(f"lost all copies of a shard in {count} {of}")
        if count := int((rows["outages_unrecovered"] > 0).sum()):
            parts.append(f"never served a shard again in {count} {of}")
        if parts:
            found.append(f"{name}: {'; '.join(parts)}.")
    return _shortened(found)


def cautions(study: Study, folder: Path | None) -> list[str]:
    """Return limits of the numbers, and the command that improves them."""
    outcomes = study.outcomes
    busy = unquiet(outcomes)
    limits = (short_of_target(outcomes), without_effect(outcomes), busy and f"{busy}.")
    found = [text for text in limits if text]
    if folder is not None:
        found += remedies_in(folder, outcomes)
    for each in outcomes:
        trial = each.identity.trial
        if not each.valid:
            reason = each.reason or "no reason recorded"
            found.append(f"{trial} is {each.status} and left out: {reason}")
        if failed := each.row()["failed_before"]:
            attempts = f"{failed} attempt{'s' * (failed != 1)}"
            text = f"{trial}: {attempts} before failed or invalid; records are in {EARLIER}/"
            found.append(text)
        if each.valid and not each.whole:
            found.append(
                f"{trial} was resumed from its checkpoints: it has no figures over time and no "
                "totals of the whole training"
            )
    return _shortened(found, 4 * MAX_LISTED)


def checks(study: Study) -> list[tuple[str, str, bool]]:
    """Return each metric that must be 0: its label, where it is or is not, and whether it holds."""
    found = []
    for key in MUST_BE_ZERO:
        known = study.frame[study.frame[key].notna()]
        broken = known.loc[known[key] != 0, "trial"]
        where = f"in {', '.join(broken)}" if len(broken) else f"none in {len(known)} trials"
        if len(known):
            found.append((study.metric(key).label, where, broken.empty))
    return found


def _shortened(texts: list[str], most: int = MAX_LISTED) -> list[str]:
    more = len(texts) - most
    return [*texts[:most], *([f"… and {more:,} more"] if more > 0 else [])]
