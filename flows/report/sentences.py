"""The report's sentences: what each strategy cost, in words, computed from the outcomes.

The wording stays with what was seen: ranges over a few seeds are given as ranges. What they show
of strategies elsewhere is said of claims alone (`flows.report.claims`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dps.events import TrialResumed
from dps.protocol.durabilities.presets import PRESETS
from flows.analysis.faults import FaultTimes
from flows.analysis.groups import Group
from flows.analysis.outcome import Outcome
from flows.analysis.statistics import FEWEST_SEEDS, Interval, interval
from flows.config.faults.text import WAYS
from flows.metrics import BY_KEY
from flows.records.record import Record

MUST_BE_ZERO = ("updates_applied_twice", "updates_replica_conflicts", "updates_audit_mismatches")

MOST_PLANNED = 3
_OVER = {
    "time": "at the same times",
    "gradients": "after as many gradients",
    "money": "for as much money",
}

_DONE = {
    "kill": "killed with SIGKILL",
    **WAYS,
    "pause": "paused with SIGSTOP",
    "slow": "slowed down",
    "cut": "cut off",
    "delay": "delayed in all its messages",
    "disk_full": "left without space on its disk",
    "corrupt": "hit by damage to its newest checkpoint",
}
_SOURCES = {
    "promoted": "a replica took over",
    "initial": "the shard went on from its initial values",
    "checkpoint": "the shard went on from its last checkpoint",
    "store": "the shard went on from the state store",
    "worker": "the shard was rebuilt from what a worker held",
    "others": "the head went on with the replicas left",
    "resumed": "the pause or cut was over before the node was given up",
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


def in_short(groups: Sequence[Group]) -> tuple[str, ...]:
    """Return three sentences: what the faults were, what they did, and what to be ready costs.

    They are of the first condition with faults; there is none without any, and fewer where a figure
    is not known of any strategy.
    """
    faulty = [group for group in groups if group.faulty]
    first = [group for group in faulty if group.condition == faulty[0].condition]
    said = (plan(first), _effects_in_short(first), _price_in_short(first, groups))
    return tuple(sentence for sentence in said if sentence)


def through_fault(group: Group, quiet: Group | None) -> Sentence:
    """Say what a fault did to one strategy; `quiet` is the same strategy without a fault."""
    sentences = [
        _recovery(group),
        _outages(group),
        _effect(group),
        _updates(group),
        _end(group, quiet),
    ]
    return Sentence(group.strategy, " ".join(s for s in sentences if s))


def without_fault(group: Group, baseline: Group | None) -> Sentence:
    """Say what one strategy cost while nothing failed, compared with `baseline`."""
    sentences = [_end(group, None), _price(group, baseline)]
    return Sentence(group.strategy, " ".join(s for s in sentences if s))


def plan(groups: Sequence[Group]) -> str:
    """Say what the faults were, over all the groups they hit."""
    struck = [trial.faults for group in groups for trial in group.trials if trial.faults]
    if not struck:
        return ""
    counts = {len(faults) for faults in struck}
    if len(counts) == 1 and max(counts) <= MOST_PLANNED:
        return " ".join(_planned(faults) for faults in zip(*struck, strict=True))
    kinds = Counter(fault.kind for faults in struck for fault in faults)
    each = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common())
    number = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{min(counts)}"
    return f"{number} faults in each trial; in all of them together {each}."


def _planned(faults: Sequence[FaultTimes]) -> str:
    nodes = " or ".join(sorted({fault.node for fault in faults}))
    low, high = min(f.updates for f in faults), max(f.updates for f in faults)
    at = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    waits = [f.capacity - f.began for f in faults if f.capacity is not None]
    back = f"; a fresh node was there {_seconds(waits)} later" if waits else ""
    what = " or ".join(done(kind) for kind in sorted({fault.kind for fault in faults}))
    return f"{nodes} was {what} once the shards had applied {at} updates{back}."


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
    ranges = (
        f"Ranges are lowest to highest over {seeds} valid trials each, which differ only in their "
        "seed."
    )
    if most < FEWEST_SEEDS:
        return (
            f"{ranges} They show what happened here; it takes {FEWEST_SEEDS} seeds at least, and "
            "better 10, to tell how likely a difference between strategies is elsewhere."
        )
    return (
        f"{ranges} They show what happened here. How likely it is elsewhere is said of the claims "
        "that were fixed beforehand; all else is exploratory."
    )


def resumed(record: Record, outcome: Outcome) -> str:
    """Say what is and what is not known of a trial that went on after an interruption."""
    [event, *_] = record.of(TrialResumed)
    return (
        f"{outcome.identity.trial} went on from its checkpoints at {event.updates:,} updates, "
        "where its record begins: it has no times, counts, resources and money of the whole."
    )


def quiet(groups: Sequence[Group], group: Group) -> Group | None:
    """Return the same strategy without a fault, if there is exactly one such group."""
    same = [g for g in groups if g.strategy == group.strategy and not g.faulty]
    return same[0] if len(same) == 1 else None


def baseline_of(groups: Sequence[Group]) -> Group | None:
    """Return the group that others are compared with: the strategy without any durability."""
    return next((group for group in groups if group.strategy == next(iter(PRESETS))), None)


def done(kind: str) -> str:
    """Say what a kind of fault does to a node, as in "killed with SIGKILL"."""
    return _DONE.get(kind, f"hit by “{kind}”")


def told(fault: FaultTimes, origin: float) -> str:
    """Say in one clause what a fault was, when, counted from `origin`, and what came of it."""
    said = f"{fault.node} was {done(fault.kind)} at {fault.began - origin:.2f} s"
    if fault.ended is not None:
        said += f" for {_short(fault.ended - fault.began)}"
    if fault.shard is None:
        return f"{said}, and every shard went on serving"
    if fault.serving is None:
        return f"{said}, and shard {fault.shard} did not come back"
    how = _SOURCES.get(fault.source or "", fault.source or "it went on")
    return f"{said}: {how} {_short(fault.serving - fault.began)} later"


# -- parts -------------------------------------------------------------------------------------


def _effects_in_short(groups: Sequence[Group]) -> str:
    means = {g.strategy: s.mean for g in groups if (s := g.spread("effect_time_mean"))}
    if not means:
        return ""
    column, seeds = BY_KEY["effect_time_mean"], max(len(group.trials) for group in groups)
    best = sorted(means, key=lambda strategy: -means[strategy])
    each = [f"{column.text(means[strategy])} points with {strategy}" for strategy in best]
    differed = (
        "From the first fault on, accuracy differed from that of the same seeds without it by"
    )
    return (
        f"{_scored(groups[0], differed)} "
        f"{_and(each)}, at the same times{f' and on average of {seeds} seeds' * (seeds > 1)}."
    )


def _price_in_short(groups: Sequence[Group], every: Sequence[Group]) -> str:
    without = [found for group in groups if (found := quiet(every, group))]
    base = baseline_of(without)
    if base is None:
        return ""
    rest = [group for group in without if group is not base]
    ratios = {g.strategy: r.mean for g in rest if (r := ratio(g, base, "cost_usd"))}
    if not ratios:
        return ""
    cheapest = sorted(ratios, key=lambda strategy: ratios[strategy])
    each = [f"{ratios[strategy]:.2f} × with {strategy}" for strategy in cheapest]
    return (
        f"To be ready for it costs, while nothing fails, beside the money of {base.strategy}, "
        f"{_and(each)}."
    )


def _and(parts: Sequence[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def _recovery(group: Group) -> str:
    if all(fault.shard is None for trial in group.trials for fault in trial.faults):
        return "Every shard went on serving."
    times = span(group, "rto_seconds", " s")
    if times is None:
        return "The shard did not come back."
    sources = {trial.first_loss.source for trial in group.trials if trial.first_loss}
    how = " or ".join(_SOURCES.get(s, s) for s in sorted(s for s in sources if s))
    waiting = group.spread("wait_capacity_seconds")
    of_which = ""
    if waiting and waiting.mean > 0:
        of_which = f", of which {span(group, 'wait_capacity_seconds', ' s')} waiting for a node"
    return (
        f"{how[:1].upper()}{how[1:]} and applied the next update {times} after the fault{of_which}."
    )


def _outages(group: Group) -> str:
    """What all faults came to, where a trial has more than one."""
    met = group.spread("faults")
    if met is None or met.high <= 1:
        return ""
    met_text = f"{span(group, 'faults')} faults{_skipped(group)}"
    if (outages := group.spread("outages")) is None or outages.high == 0:
        return f"Each trial met {met_text}, and no shard went down."
    return (
        f"Each trial met {met_text}; in {span(group, 'outages')} outages, a "
        f"shard was down for {span(group, 'downtime_seconds', ' s')} in all."
    )


def _skipped(group: Group) -> str:
    """How many more there would have been; nothing where none was skipped."""
    skipped = group.spread("faults_skipped")
    if skipped is None or skipped.high == 0:
        return ""
    return f" ({span(group, 'faults_skipped')} more found nobody there to be hit)"


def _effect(group: Group) -> str:
    parts = [
        f"{span(group, f'effect_{over}_mean', ' points')} {how}"
        for over, how in _OVER.items()
        if group.spread(f"effect_{over}_mean")
    ]
    if not parts:
        return _scored(group, "What that did to the accuracy is not known, for want of a control.")
    deficit = group.spread("gradients_deficit")
    missing = ""
    if deficit is not None and deficit.low > 0:
        missing = f", and {span(group, 'gradients_deficit')} gradients were not computed in time"
    differed = (
        "From the first fault on, accuracy differed from that of the same seeds without it by"
    )
    return f"{_scored(group, differed)} {', '.join(parts)}, on average{missing}."


def _scored(group: Group, text: str) -> str:
    """A text that speaks of accuracy, with what the trials of a group are scored by instead."""
    every = (*group.trials, *group.left_out)
    return every[0].score.said(text) if every else text


def _updates(group: Group) -> str:
    lost, replayed = group.spread("updates_lost"), group.spread("updates_replayed")
    if lost is None or replayed is None:
        return ""
    said = (
        f"It lost {span(group, 'updates_lost')} of {_safe(group)} updates"
        if lost.high > 0
        else "It lost no acked update"
    )
    if replayed.high > 0:
        said += (
            f"; {span(group, 'updates_replayed')} updates computed during the outage were "
            "applied after it"
        )
    return f"{said}."


def _safe(group: Group) -> str:
    """The updates that workers took for safe."""
    acked, buffered = f"{span(group, 'updates_acked')} acked", group.spread("updates_buffered")
    if buffered is None or buffered.high == 0:
        return acked
    return f"{acked} and {span(group, 'updates_buffered')} buffered"


def _end(group: Group, quiet: Group | None) -> str:
    final = span(group, "accuracy_final", "%")
    if final is None:
        return ""
    compared = span(quiet, "accuracy_final", "%") if quiet else None
    return _scored(group, f"Final accuracy {final}") + (
        f" ({compared} without the fault)." if compared else "."
    )


def _price(group: Group, baseline: Group | None) -> str:
    if baseline is None or baseline is group:
        return _absolute_price(group)
    found = [
        (value, what)
        for key, what in (
            ("gradients_per_second", "the gradients per second"),
            ("cpu_seconds_all", "the processor time"),
            ("sent_bytes_all", "the bytes sent"),
            ("cost_usd", "the money"),
        )
        if (value := ratio(group, baseline, key)) is not None
    ]
    if not found:
        return ""
    ratios = ", ".join(f"{_factor(value)} × {what}" for value, what in found)
    intervals = " with 95% intervals" if any(_bounded(value) for value, _ in found) else ""
    return f"Against {baseline.strategy}, on average{intervals}: {ratios}."


def _factor(ratio: Interval) -> str:
    return f"{ratio.mean:.2f}" + (f" ({ratio.low:.2f}–{ratio.high:.2f})" if _bounded(ratio) else "")


def _bounded(ratio: Interval) -> bool:
    """Whether there are enough seeds for an interval that tells something."""
    return ratio.n >= FEWEST_SEEDS and ratio.low is not None


def _absolute_price(group: Group) -> str:
    if group.spread("gradients_per_second") is None:
        return ""
    return (
        f"It took {span(group, 'gradients_per_second')} gradients per second, "
        f"{span(group, 'cpu_seconds_all', ' s')} of processor time, "
        f"{span(group, 'sent_bytes_all', ' MB')} sent, {span(group, 'cost_usd', ' USD')}."
    )


def ratio(group: Group, baseline: Group, key: str) -> Interval | None:
    """Return a figure divided by that of another group, over the seeds for which both have it."""
    mine, theirs = _by_seed(group, key), _by_seed(baseline, key)
    seeds = sorted(mine.keys() & theirs.keys())
    if not seeds or not all(theirs[seed] for seed in seeds):
        return None
    # The same records always make the same page.
    return interval([mine[seed] / theirs[seed] for seed in seeds], np.random.default_rng(0))


def _by_seed(group: Group, key: str) -> dict[int, float]:
    found = {trial.identity.seed: trial.row()[key] for trial in group.trials}
    return {s: float(v) for s, v in found.items() if s is not None and v is not None}


def _short(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _seconds(values: Sequence[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return f"{low} s" if low == high else f"{low} to {high} s"
