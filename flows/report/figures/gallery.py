"""Which figures an experiment has, and in which chapters of its report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from flows.analysis.groups import Group
from flows.report.figures import bands, bars, curves, distribution, staleness, winners
from flows.report.figures import by_axis as against
from flows.report.figures import cost as tradeoff
from flows.report.figures import recovery as through
from flows.report.figures import timeline as story
from flows.report.figures.dataset import Subject, Trial, mean_of
from flows.report.figures.figure import Chapter, Drawing
from flows.report.figures.numeric_axis import numeric_axes

# Figures of one strategy under one condition: of a larger grid nobody looks at all of them, and
# they would take most of the time of its report.
MOST_APART = 24


def chapters(
    trials: Sequence[Trial], smallest: Mapping[str, float] | None = None
) -> tuple[Chapter, ...]:
    """Return the figures of an experiment by chapter; chapters without a figure are left out.

    `smallest` are the smallest differences of interest, by metric.
    """
    subject = Subject.of(trials)
    found = _chapters(subject, smallest)
    return tuple(chapter for chapter in found if chapter.drawings)


def drawings(found: Iterable[Chapter]) -> Iterator[Drawing]:
    """Return the figures of all chapters."""
    for chapter in found:
        yield from chapter.drawings


def opening(
    trials: Sequence[Trial], drawn: Iterable[Chapter], metric: str, condition: str
) -> Drawing | None:
    """Return the figure of those `drawn` that shows a metric under a condition; None without."""
    subject, by_name = Subject.of(trials), {each.name: each for each in drawings(drawn)}
    if condition not in subject.slugs:
        return None
    kinds = next((kinds for start, kinds in _SHOWING.items() if metric.startswith(start)), ())
    names = [subject.name(kind, condition) for kind in kinds]
    against_axes = f"{metric.replace('_', '-')}-against-"
    names += [name for name in by_name if name.startswith(against_axes)]
    return next((by_name[name] for name in names if name in by_name), None)


# What shows a metric under a condition, by how its key begins; the best first.
_SHOWING = {
    "effect_time": ("accuracy-time",),
    "effect_gradients": ("accuracy-gradients",),
    "effect_money": ("cost-effect", "cost-accuracy"),
    "accuracy": ("accuracy-time", "accuracy-gradients"),
    "cost": ("cost-accuracy",),
    "rto": ("recovery-distribution",),
    "recovery": ("recovery-distribution",),
    "staleness": ("staleness", "staleness-time"),
    "gradients_per_second": ("gradients-per-second-time", "gradients-time"),
    "cpu": ("cpu-time",),
    "peak": ("memory-time",),
    "sent": ("bytes-time",),
}


def _chapters(subject: Subject, smallest: Mapping[str, float] | None) -> Iterator[Chapter]:
    axes = numeric_axes([outcome.identity.labels for _, outcome in subject.trials])
    maps = winners.maps(subject, axes, smallest)
    yield _chapter("winners", "Who wins where", winners.NOTE, maps)
    for axis in axes:
        name, title = f"against-{axis.slug}", f"Against {axis.name}"
        yield _chapter(name, title, against.NOTE, against.against(subject, axis))
    said = subject.score.said
    yield _chapter("accuracy", said("Accuracy"), bands.NOTE, _accuracy(subject), _opening(subject))
    yield _chapter("recovery", "Recovery and staleness", "", _recovery(subject))
    yield _chapter("money", said("Cost against accuracy"), "", _money(subject))
    apart = _apart(subject)
    left_out = _left_out(subject, apart)
    yield _chapter(
        "through",
        "Through the fault",
        "Every trial of a strategy on the time since its fault; of several, the first by which a "
        f"shard was not served for a time, else the first of all.{left_out}",
        _through(subject, apart),
    )
    yield _chapter(
        "timeline",
        "One trial from beginning to end",
        f"A lane for each shard, with the parts of every recovery, and for each node.{left_out}",
        (story.story(subject, group) for group in apart),
    )
    yield _chapter("work", "Work and resources over time", bands.NOTE, _over_time(subject))
    yield _chapter("resources", "Resources by role and link", "", _by_part(subject))


def _chapter(
    name: str,
    title: str,
    note: str,
    found: Iterable[Drawing | None],
    opening: str = "",
) -> Chapter:
    drawn = tuple(drawing for drawing in found if drawing is not None)
    return Chapter(name, title, note, drawn, opening)


def _opening(subject: Subject) -> str:
    """The figure that says most: of the first condition with a fault; "" without any."""
    faulty = next((each for each in subject.conditions if subject.faulty(each)), None)
    return "" if faulty is None else subject.name(curves.ACCURACY_BY_TIME.name, faulty)


def _accuracy(subject: Subject) -> Iterator[Drawing | None]:
    for measure in (
        curves.ACCURACY_BY_GRADIENTS,
        curves.LOSS_BY_GRADIENTS,
        curves.ACCURACY_BY_TIME,
    ):
        if measure is curves.LOSS_BY_GRADIENTS and subject.score.key == "loss":
            continue  # it is the figure before
        for condition in subject.conditions:
            yield curves.curves(subject, measure, condition)


def _apart(subject: Subject) -> tuple[Group, ...]:
    """Return the groups with faults that have figures of their own.

    Where all are too many, those under as many conditions as fit, the longest outages first.
    """
    faulty = tuple(group for group in subject.groups if group.faulty)
    if len(faulty) <= MOST_APART:
        return faulty
    down: dict[str, float] = {}
    for group in faulty:
        seconds = mean_of(group, "downtime_seconds")
        down[group.condition] = max(seconds, down.get(group.condition, 0.0))
    shown: list[str] = []
    for condition in sorted(down, key=lambda condition: -down[condition]):
        if sum(group.condition in (*shown, condition) for group in faulty) > MOST_APART:
            break
        shown.append(condition)
    return tuple(group for group in faulty if group.condition in shown)


def _left_out(subject: Subject, apart: Sequence[Group]) -> str:
    """Say which strategies under which conditions have figures of their own, if not all have."""
    faulty = sum(group.faulty for group in subject.groups)
    if len(apart) == faulty:
        return ""
    shown = ", ".join(dict.fromkeys(f"“{group.condition}”" for group in apart))
    told = f"those with the longest outages: {shown}" if apart else "none"
    return f" Of {faulty} strategies under conditions with faults, {told}."


def _through(subject: Subject, apart: Sequence[Group]) -> Iterator[Drawing | None]:
    quiet = {group.condition for group in subject.groups if not group.faulty}
    reference = next(iter(quiet)) if len(quiet) == 1 else None
    for group in apart:
        yield through.through_fault(subject, group, reference)


def _recovery(subject: Subject) -> Iterator[Drawing | None]:
    yield bars.recovery_time(subject)
    for condition in subject.conditions:
        yield distribution.recovery_times(subject, condition)
    for condition in subject.conditions:
        yield staleness.distributions(subject, condition)


def _over_time(subject: Subject) -> Iterator[Drawing | None]:
    for condition in subject.conditions:
        if curves.is_rescaled(subject, condition):  # else it is the slope of the next figure
            yield curves.curves(subject, curves.RATE_BY_TIME, condition)
        for measure in (
            curves.GRADIENTS_BY_TIME,
            curves.STALENESS_BY_TIME,
            curves.CPU_BY_TIME,
            curves.MEMORY_BY_TIME,
            curves.BYTES_BY_TIME,
        ):
            yield curves.curves(subject, measure, condition)


def _money(subject: Subject) -> Iterator[Drawing | None]:
    for draw in (tradeoff.cost_accuracy, tradeoff.cost_effect):
        for condition in subject.conditions:
            yield draw(subject, condition)


def _by_part(subject: Subject) -> Iterator[Drawing | None]:
    for condition in subject.conditions:
        yield from bars.by_part(subject, condition)
