"""The report's sentences: what each strategy cost, in words, computed from the outcomes.

The wording stays with what was seen: ranges over a few seeds are given as ranges. What they show
of strategies elsewhere is said of claims alone (`flows.report.claims`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def through_fault(group: Group, quiet: Group | None) -> Sentence:
    """Say what a fault did to one strategy; `quiet` is the same strategy without a fault."""
    sentences = [
        _recovery(group),
        _outages(group),
        _ended_within(group),
        _effect(group),
        _updates(group),
        _end(group, quiet),
        _money(group, quiet),
    ]
    return Sentence(group.strategy, " ".join(s for s in sentences if s))


def without_fault(group: Group, baseline: Group | None) -> Sentence:
    """Say what one strategy cost while nothing failed, compared with `baseline`."""
    sentences = [_end(group, None), _price(group, baseline)]
    return Sentence(group.strategy, " ".join(s for s in sentences if s))


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


def _recovery(group: Group) -> str:
    trials = [trial for trial in group.trials if trial.whole]
    if not trials:
        return "What its faults did is not known: its trials were resumed."
    if all(fault.shard is None for trial in trials for fault in trial.faults):
        return "Every shard went on serving."
    times = span(group, "rto_seconds", " s")
    if times is None:
        return "The shard did not come back."
    sources = {trial.first_loss.source for trial in trials if trial.first_loss}
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


def _ended_within(group: Group) -> str:
    """In how many trials the training was through before a shard had recovered."""
    cut = sum(bool(trial.row()["outages_unrecovered"]) for trial in group.trials)
    if not cut:
        return ""
    return (
        f"{cut} of {len(group.trials)} trials ended within an outage: a shard had applied no "
        "update again, so that what they end with shows nothing of that recovery."
    )


def _skipped(group: Group) -> str:
    """How many more there would have been; nothing where none was skipped."""
    skipped = group.spread("faults_skipped")
    if skipped is None or skipped.high == 0:
        return ""
    return f" ({span(group, 'faults_skipped')} more found nobody there to be hit)"


def _effect(group: Group) -> str:
    parts = [
        f"{span(group, f'effect_{over}_mean', _unit(group, f'effect_{over}_mean'))} {how}"
        for over, how in _OVER.items()
        if group.spread(f"effect_{over}_mean")
    ]
    if not parts:
        return (
            f"What that did to {_score(group).name} is not known: no trial of the same seed "
            "without the fault counts."
        )
    deficit = group.spread("gradients_deficit")
    missing = ""
    if deficit is not None and deficit.low > 0:
        missing = f"; {span(group, 'gradients_deficit')} fewer gradients were computed in that time"
    return (
        f"From the fault on, {_measured(group)} differed from the same seed without the fault, on "
        f"average over that time, by {', '.join(parts)}{missing}."
    )


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


def _updates(group: Group) -> str:
    lost, replayed = group.spread("updates_lost"), group.spread("updates_replayed")
    if lost is None or replayed is None:
        return ""
    said = (
        f"It lost {span(group, 'updates_lost')} of {_safe(group)} updates"
        if lost.high > 0
        else "It lost no acknowledged update"
    )
    if replayed.high > 0:
        said += (
            f"; {span(group, 'updates_replayed')} updates computed during the outage were "
            "applied after it"
        )
    return f"{said}."


def _safe(group: Group) -> str:
    """The updates that workers took for safe."""
    acked = f"{span(group, 'updates_acked')} acknowledged"
    buffered = group.spread("updates_buffered")
    if buffered is None or buffered.high == 0:
        return acked
    return f"{acked} and {span(group, 'updates_buffered')} buffered"


def _end(group: Group, quiet: Group | None) -> str:
    final = span(group, "accuracy_final", _unit(group, "accuracy_final"))
    if final is None:
        return ""
    compared = span(quiet, "accuracy_final", _unit(quiet, "accuracy_final")) if quiet else None
    label = _column(group, "accuracy_final").label
    said = f"{label[0].upper()}{label[1:]} {final}"
    return f"{said} ({compared} without the fault)." if compared else f"{said}."


def _money(group: Group, quiet: Group | None) -> str:
    spent = span(group, "cost_usd", " USD")
    if spent is None:
        return ""
    compared = span(quiet, "cost_usd", " USD") if quiet else None
    return f"It cost {spent}" + (f" ({compared} without the fault)." if compared else ".")


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
