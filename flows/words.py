"""Owns the report's sentences: what each strategy cost, in words, computed from the outcomes.

The wording stays with what was seen. Ranges over a few seeds are given as ranges; nothing is
called significant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dps.core.recovery import PRESETS
from flows.columns import BY_KEY
from flows.summary import Group

# Evaluations of one model in training differ by about as much from one to the next.
NOTABLE_DROP = 0.01

_DONE = {"kill": "killed with SIGKILL", "pause": "paused with SIGSTOP"}
_SOURCES = {
    "promoted": "a replica took over",
    "initial": "the shard went on from its initial values",
    "checkpoint": "the shard went on from its last checkpoint",
    "store": "the shard went on from the state store",
    "others": "the head went on with the replicas left",
    "resumed": "the pause was over before the node was given up",
}


@dataclass(frozen=True, slots=True)
class Sentence:
    """What is said of one strategy."""

    strategy: str
    text: str


def span(group: Group, key: str, unit: str = "") -> str | None:
    """Return a figure's range over a group's trials, such as "1.55–1.61 s"; None without one."""
    spread = group.spread(key)
    if spread is None:
        return None
    column = BY_KEY[key]
    low, high = column.text(spread.low), column.text(spread.high)
    separator = " to " if low.startswith("−") or high.startswith("−") else "–"
    return (low if low == high else f"{low}{separator}{high}") + unit


def through_fault(group: Group, quiet: Group | None) -> Sentence:
    """Say what a fault did to one strategy; `quiet` is the same strategy without a fault."""
    sentences = [_recovery(group), _accuracy(group), _updates(group), _end(group, quiet)]
    return Sentence(group.strategy, " ".join(s for s in sentences if s))


def without_fault(group: Group, baseline: Group | None) -> Sentence:
    """Say what one strategy cost while nothing failed, compared with `baseline`."""
    sentences = [_end(group, None), _price(group, baseline)]
    return Sentence(group.strategy, " ".join(s for s in sentences if s))


def plan(groups: Sequence[Group]) -> str:
    """Say what the fault was, over all the groups it hit."""
    faults = [trial.faults[0] for group in groups for trial in group.trials if trial.faults]
    if not faults:
        return ""
    nodes = " or ".join(sorted({fault.node for fault in faults}))
    low, high = min(f.updates for f in faults), max(f.updates for f in faults)
    at = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    waits = [f.capacity - f.began for f in faults if f.capacity is not None]
    back = f" A fresh node was there {_seconds(waits)} later." if waits else ""
    done = " or ".join(_DONE[kind] for kind in sorted({fault.kind for fault in faults}))
    return f"{nodes} was {done} once the shards had applied {at} updates.{back}"


def moments(group: Group) -> str:
    """Say when a fault was detected, when the shard served again, and when it went on."""
    parts = [
        sentence.format(span(group, key, " s"))
        for sentence, key in (
            ("detected {} after the fault", "detect_seconds"),
            ("serving again {} later", "restore_seconds"),
            ("first update {} after that", "first_applied_seconds"),
        )
        if group.spread(key)
    ]
    said = ", ".join(parts) if parts else "not detected"
    return f"{said[:1].upper()}{said[1:]}."


def caution(groups: Sequence[Group]) -> str:
    """Say how much the figures can carry."""
    counts = {len(group.trials) for group in groups}
    fewest, most = min(counts, default=0), max(counts, default=0)
    if most <= 1:
        return (
            "There is one valid trial at most of each kind. It shows what happened once, not how "
            "much that varies or how likely a difference between strategies is elsewhere."
        )
    seeds = f"{most}" if fewest == most else f"{fewest} to {most}"
    return (
        f"Ranges are lowest to highest over {seeds} valid trials each, which differ only in their "
        "seed. They show what happened here; they do not tell how likely a difference between "
        "strategies is elsewhere."
    )


def baseline_of(groups: Sequence[Group]) -> Group | None:
    """Return the group that others are compared with: the strategy without any durability."""
    return next((group for group in groups if group.strategy == next(iter(PRESETS))), None)


# -- parts -------------------------------------------------------------------------------------


def _recovery(group: Group) -> str:
    if all(trial.faults[0].shard is None for trial in group.trials if trial.faults):
        return "No shard lost a replica."
    times = span(group, "rto_seconds", " s")
    if times is None:
        return "The shard did not come back."
    sources = {trial.faults[0].source for trial in group.trials if trial.faults}
    how = " or ".join(_SOURCES.get(s, s) for s in sorted(s for s in sources if s))
    waiting = group.spread("wait_capacity_seconds")
    of_which = ""
    if waiting and waiting.mean > 0:
        of_which = f", of which {span(group, 'wait_capacity_seconds', ' s')} waiting for a node"
    return (
        f"{how[:1].upper()}{how[1:]} and applied the next update {times} after the fault{of_which}."
    )


def _accuracy(group: Group) -> str:
    before, after = span(group, "accuracy_before", "%"), span(group, "accuracy_after", "%")
    drop = group.spread("accuracy_drop")
    if before is None or after is None or drop is None:
        return ""
    if drop.low > NOTABLE_DROP:
        return f"Test accuracy fell from {before} to {after}{_regained(group)}."
    seen = ": no drop was seen" if drop.high <= 0 else ""
    return f"Test accuracy was {before} before and {after} after it{seen}."


def _regained(group: Group) -> str:
    regained, trials = group.spread("regain_seconds"), len(group.trials)
    if regained is None:
        return " and did not get back to where it was"
    if regained.count < trials:
        return f" and got back to where it was in {regained.count} of {trials} trials"
    return f" and was back {span(group, 'regain_seconds', ' s')} after the fault"


def _updates(group: Group) -> str:
    lost, replayed = group.spread("updates_lost"), group.spread("updates_replayed")
    if lost is None or replayed is None:
        return ""
    said = (
        f"It lost {span(group, 'updates_lost')} of {span(group, 'updates_acked')} acked updates"
        if lost.high > 0
        else "It lost no acked update"
    )
    if replayed.high > 0:
        said += (
            f"; {span(group, 'updates_replayed')} gradients computed during the outage were "
            "applied after it"
        )
    return f"{said}."


def _end(group: Group, quiet: Group | None) -> str:
    final = span(group, "accuracy_final", "%")
    if final is None:
        return ""
    compared = span(quiet, "accuracy_final", "%") if quiet else None
    return f"Final accuracy {final}" + (f" ({compared} without the fault)." if compared else ".")


def _price(group: Group, baseline: Group | None) -> str:
    if baseline is None or baseline is group:
        return _absolute_price(group)
    ratios = [
        f"{value:.2f} × {what}"
        for key, what in (
            ("updates_per_second", "the gradients per second"),
            ("cpu_seconds_all", "the processor time"),
            ("sent_bytes_all", "the bytes sent"),
            ("cost_usd", "the money"),
        )
        if (value := ratio(group, baseline, key)) is not None
    ]
    return f"Against {baseline.strategy}, on average: {', '.join(ratios)}." if ratios else ""


def _absolute_price(group: Group) -> str:
    return (
        f"It took {span(group, 'updates_per_second')} gradients per second, "
        f"{span(group, 'cpu_seconds_all', ' s')} of processor time, "
        f"{span(group, 'sent_bytes_all', ' MB')} sent, {span(group, 'cost_usd', ' USD')}."
    )


def ratio(group: Group, baseline: Group, key: str) -> float | None:
    """Return a figure's mean over one group's trials divided by that over another's."""
    mine, theirs = group.spread(key), baseline.spread(key)
    return mine.mean / theirs.mean if mine and theirs and theirs.mean else None


def _seconds(values: Sequence[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return f"{low} s" if low == high else f"{low} to {high} s"
