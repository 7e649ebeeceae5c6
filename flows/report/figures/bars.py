"""Bars in parts: time to recover, and processor time, memory and bytes, a bar per strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flows.analysis.groups import Group
from flows.metrics.metric import LINKS
from flows.report.figures.dataset import Subject, mean_of, row_names, titled
from flows.report.figures.figure import Drawing, Table
from flows.report.figures.style import (
    INK,
    PART_COLOURS,
    SMALL,
    count_told,
    footnote,
    legend_above,
    panel,
    patch_key,
    row_axis,
)

SERVING_ROLES = ("server", "replica", "spare", "store")
Parts = Callable[[Group], Sequence[float]]
Shown = tuple[str, Sequence[str], Parts, int]  # label of the axis, names and sizes of parts, digits
RECOVERY_PARTS = ("detect", "wait for a node", "restore", "first update")


def recovery_time(subject: Subject) -> Drawing | None:
    """Draw the parts of the recovery time, stacked, with a dot for each trial's total."""

    def parts(group: Group) -> list[float]:
        detect, wait, restore, first = (
            mean_of(group, f"{part}_seconds")
            for part in ("detect", "wait_capacity", "restore", "first_applied")
        )
        return [detect, wait, max(0.0, restore - wait), max(0.0, first)]

    groups = [group for group in subject.groups if group.spread("rto_seconds")]
    if not groups:
        return None
    return _stacked(
        subject,
        groups,
        ("recovery-time", "Time to recover"),
        "Mean over trials, of each trial's first fault by which a shard was not served for a time; "
        "a dot for each trial. How long a fresh node takes to come is set by the fault plan, not "
        "by the strategy.",
        ("seconds since the fault", RECOVERY_PARTS, parts, 2),
        totals="rto_seconds",
    )


def _means(prefix: str, names: Sequence[str], unit: float = 1) -> Parts:
    """Return how to find the means of a group's figures of these names, in a unit."""
    return lambda group: [mean_of(group, f"{prefix}{name}") / unit for name in names]


# What is drawn for each condition: the name, the title and the note of a figure, and what it shows.
_BY_PART: tuple[tuple[str, str, str, Shown], ...] = (
    (
        "cpu-roles",
        "Processor time of the serving nodes",
        "Mean over trials; from process start on.",
        ("CPU seconds", SERVING_ROLES, _means("cpu_seconds_", SERVING_ROLES), 2),
    ),
    (
        "memory-roles",
        "Memory of the serving nodes",
        "Largest resident set of each process, summed up; mean over trials. A node in the place "
        "of a lost one is not counted again.",
        ("MB", SERVING_ROLES, _means("peak_bytes_", SERVING_ROLES, 1e6), 0),
    ),
    (
        "bytes-links",
        "Bytes sent, by kind of link",
        "All nodes together; mean over trials.",
        ("MB sent", LINKS, _means("sent_bytes_link_", LINKS, 1e6), 1),
    ),
)


def by_part(subject: Subject, condition: str) -> Iterator[Drawing]:
    """Draw what the serving nodes use, stacked by role, and bytes, stacked by kind of link."""
    for kind, title, note, shown in _BY_PART:
        called = subject.name(kind, condition), titled(title, condition)
        yield _stacked(subject, subject.groups_under(condition), called, note, shown)


def _stacked(
    subject: Subject,
    groups: Sequence[Group],
    called: tuple[str, str],
    note: str,
    shown: Shown,
    totals: str | None = None,
) -> Drawing:
    """Draw a bar for each group; `totals` names the figure whose values are dots on it."""
    label, names, parts_of, digits = shown
    figure, axes = panel(height=0.62 + 0.24 * max(2, len(groups)))
    rows: list[tuple[str, str, str, float]] = []
    for place, group in enumerate(groups):
        left = 0.0
        for name, part, colour in zip(names, parts_of(group), PART_COLOURS, strict=True):
            axes.barh(
                place, part, left=left, color=colour, height=0.6, linewidth=0.4, edgecolor="white"
            )
            rows.append((group.strategy, group.condition, name, part))
            left += part
        each = [float(v) for o in group.trials if totals and (v := o.row()[totals]) is not None]
        colour = subject.looks[group.strategy].colour
        dot: dict[str, Any] = {"markersize": 3, "markeredgecolor": "white", "markeredgewidth": 0.4}
        axes.plot(each, [place] * len(each), "o", color=colour, **dot)
        rows += [(group.strategy, group.condition, "total of a trial", value) for value in each]
        axes.annotate(
            f"{left:.{digits}f}",
            (max([left, *each]), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=SMALL,
        )
    row_axis(axes, row_names(groups), [subject.looks[group.strategy].colour for group in groups])
    axes.set_xlabel(label)
    axes.margins(x=0.16)
    axes.set_xlim(left=0)
    occurring = {part for _, _, part, size in rows if size > 0}
    keys = [
        patch_key(name, colour)
        for name, colour in zip(names, PART_COLOURS, strict=True)
        if name in occurring
    ]
    legend_above(figure, keys)
    counts = count_told([len(group.trials) for group in groups], "trial")
    dots = "; dots: each trial's total" if totals else ""
    footnote(figure, f"{counts} per bar; mean, no interval{dots}")
    name, title = called
    table = Table(("strategy", "condition", "part", label), tuple(rows))
    return Drawing(name, title, note, figure, table, rows=True)
