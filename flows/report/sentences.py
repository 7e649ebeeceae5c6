"""The report's sentences: what it opens with, and notes of figures, computed from the outcomes.

The wording stays with what was seen: ranges over a few seeds are given as ranges. What they show
of strategies elsewhere is said of claims alone (`flows.report.claims`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from dps.events import TrialResumed
from dps.protocol.durabilities.presets import PRESETS
from flows.analysis.faults import FaultTimes
from flows.analysis.groups import Group
from flows.analysis.outcome import Outcome
from flows.analysis.statistics import FEWEST_SEEDS, Interval, interval
from flows.config.faults.text import WAYS
from flows.metrics import BY_KEY, Metric
from flows.metrics.score import ACCURACY, Score
from flows.records.record import Record

MUST_BE_ZERO = ("updates_applied_twice", "updates_replica_conflicts", "updates_audit_mismatches")

MOST_PLANNED = 3
MOST_LISTED = 6

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


def span(group: Group, key: str, unit: str = "") -> str | None:
    """Return a figure's range over a group's trials, such as "1.55–1.61 s"; None without one."""
    spread = group.spread(key)
    if spread is None:
        return None
    column = _column(group, key)
    low, high = column.text(spread.low), column.text(spread.high)
    separator = " to " if low.startswith("−") or high.startswith("−") else "–"
    return (low if low == high else f"{low}{separator}{high}") + unit


def in_short(groups: Sequence[Group], baseline: str | None = None) -> tuple[str, ...]:
    """Return three sentences: what was done, what came of it, and what it cost in money.

    They are of the first condition with faults, else of the first. There are fewer where a figure
    is not known of any strategy. Money is told against the `baseline`; None: against the strategy
    that keeps nothing.
    """
    faulty = [group for group in groups if group.faulty]
    first = [group for group in groups if group.condition == (faulty or groups)[0].condition]
    if not faulty:
        price = _price_in_short(first, baseline)
        said = _without_faults(first), _final_in_short(first), price[:1].upper() + price[1:]
        return tuple(sentence for sentence in said if sentence)
    without = [found for group in first if (found := quiet(groups, group))]
    several = len({group.condition for group in faulty}) > 1
    under = f"Under “{first[0].condition}”: " if several else ""
    price = _price_in_short(without, baseline)
    ready = f"Without a fault, {price}" if price else ""
    said = under + plan(first), _effects_in_short(first), ready
    return tuple(sentence for sentence in said if sentence)


def plan(groups: Sequence[Group]) -> str:
    """Say what the faults were, over all the groups they hit."""
    trials = [trial.faults for group in groups for trial in group.trials if trial.whole]
    struck = [faults for faults in trials if faults]
    if not struck:
        return ""
    if len({*map(len, struck)}) == 1 and len(struck[0]) <= MOST_PLANNED:
        said = " ".join(_planned(faults) for faults in zip(*struck, strict=True))
        if len(struck) == len(trials):
            return said
        return f"{said} So it was in {len(struck)} of {len(trials)} trials; the rest met no fault."
    counts = {*map(len, trials)}
    kinds = Counter(fault.kind for faults in struck for fault in faults)
    each = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common())
    number = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{min(counts)}"
    return f"{number} faults in each trial; in all of them together {each}."


def _planned(faults: Sequence[FaultTimes]) -> str:
    nodes = " or ".join(sorted({fault.node for fault in faults}))
    low, high = min(f.updates for f in faults), max(f.updates for f in faults)
    at = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    waits = [f.capacity - f.began for f in faults if f.capacity is not None]
    back = f"; a new node was ready {_seconds(waits)} later" if waits else ""
    what = " or ".join(done(kind) for kind in sorted({fault.kind for fault in faults}))
    return f"{nodes} was {what} after {at} updates{back}."


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
    """Return the same strategy without a fault, under otherwise the same condition.

    There is none where several groups may be meant.
    """
    same = [g for g in groups if g.strategy == group.strategy and not g.faulty]
    if len(same) > 1:
        same = [g for g in same if _besides_faults(g) == _besides_faults(group)]
    return same[0] if len(same) == 1 else None


def _besides_faults(group: Group) -> dict[str, str]:
    first = (*group.trials, *group.left_out)[0]
    return {axis: label for axis, label in first.identity.labels.items() if axis != "faults"}


def baseline_of(groups: Sequence[Group], name: str | None = None) -> Group | None:
    """Return the group that others are compared with: that of a `name`, or that keeps nothing."""
    wanted = next(iter(PRESETS)) if name is None else name
    return next((group for group in groups if group.strategy == wanted), None)


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
    column, unit = _column(groups[0], "effect_time_mean"), _unit(groups[0], "effect_time_mean")
    each = [f"{column.text(means[name])}{unit} with {name}" for name in _best_first(groups, means)]
    return (
        f"From the fault on, {_measured(groups[0])} differed on average by {_listed(each)} from "
        f"the same seed without the fault{_mean_of(groups, column.key)}."
    )


def _without_faults(groups: Sequence[Group]) -> str:
    trials = [trial for group in groups for trial in group.trials]
    if not trials:
        return ""
    each = _seeds([len(group.trials) for group in groups])
    axis = next(iter(trials[0].identity.labels), None)
    if axis is None or len(groups) == 1:
        return f"One setting was run without faults, with {each}."
    return f"{len(groups)} settings of {axis} were run without faults, each with {each}."


def _final_in_short(groups: Sequence[Group]) -> str:
    column = _column(groups[0], "accuracy_final")
    means = {g.strategy: s.mean for g in groups if (s := g.spread(column.key))}
    if not means:
        return ""
    best = _best_first(groups, means)
    each = [f"{column.text(means[strategy])}{column.unit} with {strategy}" for strategy in best]
    label = f"{column.label[:1].upper()}{column.label[1:]}"
    return f"{label} was {_listed(each)}{_mean_of(groups, column.key)}."


def _best_first(groups: Sequence[Group], means: Mapping[str, float]) -> list[str]:
    """Strategies by means of the score, or of effects on it."""
    sign = _score(groups[0]).sign
    return sorted(means, key=lambda strategy: -sign * means[strategy])


def _price_in_short(groups: Sequence[Group], baseline: str | None) -> str:
    """What groups without a fault cost, as multiples of what one of them does."""
    base = baseline_of(groups, baseline) or baseline_of(groups)
    if base is None:
        return ""
    rest = [group for group in groups if group is not base]
    ratios = {g.strategy: r.mean for g in rest if (r := ratio(g, base, "cost_usd"))}
    if not ratios:
        own = span(base, "cost_usd", " USD")
        return f"it cost {own}." if own and not rest else ""
    cheapest = sorted(ratios, key=lambda strategy: ratios[strategy])
    each = [f"{strategy} cost {ratios[strategy]:.2f} times" for strategy in cheapest]
    return f"{_listed(each)} the money of {base.strategy}."


def _measured(group: Group) -> str:
    """What the model is scored by; where that is not more, it says that less is better."""
    score = _score(group)
    return score.name if score.better == "higher" else f"{score.name} (less is better)"


def _mean_of(groups: Sequence[Group], key: str) -> str:
    """Of how many seeds the means of a figure are; nothing where each is one trial's."""
    counts = [spread.count for group in groups if (spread := group.spread(key))]
    if max(counts) == 1:
        return ""
    return f" ({'mean' if min(counts) == max(counts) else 'means'} of {_seeds(counts)})"


def _seeds(counts: Sequence[int]) -> str:
    """Say how many seeds there are: "3 seeds", or "1 to 3 seeds"."""
    fewest, most = min(counts), max(counts)
    number = f"{most}" if fewest == most else f"{fewest} to {most}"
    return f"{number} seed{'s' if most != 1 else ''}"


def _listed(parts: Sequence[str]) -> str:
    """Join what is said of each strategy, in order; of very many, the first and the last."""
    if len(parts) > MOST_LISTED:
        return f"between {parts[0]} and {parts[-1]}"
    return _and(parts)


def _and(parts: Sequence[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def _score(group: Group) -> Score:
    """What the trials of a group are scored by."""
    every = (*group.trials, *group.left_out)
    return every[0].score if every else ACCURACY


def _column(group: Group, key: str) -> Metric:
    return _score(group).of(BY_KEY[key])


def _unit(group: Group, key: str) -> str:
    """The unit of a figure, as it follows a number in a sentence."""
    unit = _column(group, key).unit
    return unit if unit in ("", "%") else f" {unit}"


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
