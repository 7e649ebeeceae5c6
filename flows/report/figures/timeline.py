"""The story of one trial: shards and nodes in lanes, with every fault and recovery."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from dps.core.names import ROLES
from dps.events import CheckpointWritten, Replayed, ReplicaAdded, Restored
from flows.analysis.faults import FaultTimes
from flows.analysis.groups import Group
from flows.analysis.processes import deaths, joins, process_of
from flows.records.record import Record
from flows.report import sentences as words
from flows.report.figures.bars import RECOVERY_PARTS
from flows.report.figures.curves import SECONDS
from flows.report.figures.dataset import Subject, Trial, end, start, titled, whole
from flows.report.figures.figure import Drawing, Table
from flows.report.figures.style import (
    BAD,
    GRID,
    INK,
    MUTED,
    PART_COLOURS,
    REFERENCE,
    Key,
    footnote,
    legend_above,
    line_key,
    panel,
    patch_key,
    row_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UP, SERVING, STRUCK = "node up", "serving", "fault"
AFFECTED, AWAY = "while it lasts", "not given up"
CHECKPOINT, REPLAYED, REPLICA = "checkpoint", "replay", "replica added"
MOST_TOLD = 4
_MARKERS = {
    STRUCK: ("X", BAD, 5.5),
    CHECKPOINT: ("|", MUTED, 4.5),
    REPLAYED: ("^", INK, 4),
    REPLICA: ("o", INK, 3),
}
_COLOURS = {
    UP: GRID,
    **dict(zip(RECOVERY_PARTS, PART_COLOURS, strict=True)),
    AWAY: REFERENCE,
    AFFECTED: BAD,
}


@dataclass(frozen=True, slots=True)
class Stretch:
    """Something in a lane, from `begin` to `end`: a moment where these are equal."""

    lane: str
    what: str
    begin: float
    end: float
    detail: str = ""


def story(subject: Subject, group: Group) -> Drawing | None:
    """Draw the first trial of a group that had a fault; None where there is none."""
    told = [trial for trial in subject.under(group.condition, group.strategy) if trial[1].faults]
    if not told:
        return None
    record, outcome = min(told, key=lambda trial: trial[1].identity.seed or 0)
    stretches = list(_stretches((record, outcome)))
    lanes = list(dict.fromkeys(stretch.lane for stretch in stretches))
    figure, axes = panel(height=0.62 + 0.15 * len(lanes))
    for stretch in stretches:
        _draw(axes, stretch, lanes.index(stretch.lane), subject.looks[group.strategy].colour)
    row_axis(axes, lanes, [INK if lane.startswith("shard ") else MUTED for lane in lanes])
    axes.set_xlabel(SECONDS)
    axes.set_xlim(0, 1.01 * (end(record) - start(record)))
    legend_above(figure, _keys(stretches, subject.looks[group.strategy].colour))
    footnote(figure, "n = 1 trial: no interval")
    return Drawing(
        name=subject.name("timeline", group.condition, group.strategy),
        title=titled(group.strategy, group.condition),
        note=_note(record, outcome.identity.seed, outcome.faults),
        figure=figure,
        table=Table(
            ("lane", "what", "from", "to", "detail"),
            tuple((s.lane, s.what, s.begin, s.end, s.detail) for s in stretches),
        ),
        strategy=group.strategy,
        width="double",
        rows=True,
    )


def _stretches(trial: Trial) -> Iterator[Stretch]:
    record, outcome = trial
    origin, last = start(record), end(record)
    for stretch in (*_shards(record, outcome.faults, last), *_nodes(record, outcome.faults, last)):
        begin, until = max(stretch.begin, origin), min(stretch.end, last)
        if begin <= until:
            yield Stretch(
                stretch.lane, stretch.what, begin - origin, until - origin, stretch.detail
            )


# -- lanes -------------------------------------------------------------------------------------


def _shards(record: Record, faults: Sequence[FaultTimes], last: float) -> Iterator[Stretch]:
    """When each shard served, how it came back, and what became of its state."""
    for shard in sorted({event.shard for event in record.of(Restored)}):
        lane = f"shard {shard}"
        yield Stretch(lane, SERVING, start(record), last)
        for fault in faults:
            if fault.shard == shard:
                yield from _recovery(lane, fault, last)
        moments: list[tuple[str, CheckpointWritten | ReplicaAdded | Replayed]] = [
            *((CHECKPOINT, event) for event in record.of(CheckpointWritten)),
            *((REPLICA, event) for event in record.of(ReplicaAdded)),
            *((REPLAYED, event) for event in record.of(Replayed)),
        ]
        for name, event in moments:
            if event.shard == shard and event.t >= start(record):
                yield Stretch(lane, name, event.t, event.t, f"version {event.version}")


def _recovery(lane: str, fault: FaultTimes, last: float) -> Iterator[Stretch]:
    """The parts of one recovery; one that was not over when the training ended ends with it."""
    detail = f"fault {fault.fault}"
    if fault.detected is None:
        # Nobody gave the node up: there was nothing to recover, but the shard was away.
        yield Stretch(lane, AWAY, fault.began, fault.serving or last, detail)
        return
    ready = fault.detected + (fault.wait_capacity_seconds or 0.0)
    moments = [fault.began, fault.detected, ready, fault.serving, fault.first_applied]
    for what, (begin, until) in zip(RECOVERY_PARTS, pairwise(moments), strict=True):
        if begin is not None and until != begin:
            yield Stretch(lane, what, begin, until or last, detail)


def _nodes(record: Record, faults: Sequence[FaultTimes], last: float) -> Iterator[Stretch]:
    """When each node was up, and what was done to it."""
    died = deaths(record)
    joined = sorted(joins(record).values(), key=lambda e: (_order(e.role), e.node, e.t))
    for event in joined:
        yield Stretch(event.node, UP, event.t, died.get(process_of(event), last), event.role)
    for fault in faults:
        # What damages the files of a shard has that as its node.
        lane = fault.node.replace("shard-", "shard ")
        if fault.ended is not None:
            yield Stretch(lane, AFFECTED, fault.began, fault.ended, fault.kind)
        detail = f"fault {fault.fault}: {fault.kind}"
        yield Stretch(lane, STRUCK, fault.began, fault.began, detail)


def _order(role: str) -> int:
    return ROLES.index(role) if role in ROLES else len(ROLES)


# -- drawing -----------------------------------------------------------------------------------


def _draw(axes: Axes, stretch: Stretch, place: int, own: str) -> None:
    if stretch.what in _MARKERS:
        marker, colour, size = _MARKERS[stretch.what]
        axes.plot(stretch.begin, place, marker, color=colour, markersize=size, zorder=4)
        return
    axes.barh(
        place,
        stretch.end - stretch.begin,
        left=stretch.begin,
        height=0.3 if stretch.what in (UP, SERVING) else 0.62,
        color=own if stretch.what == SERVING else _COLOURS[stretch.what],
        linewidth=0,
    )


def _keys(stretches: Sequence[Stretch], own: str) -> list[Key]:
    seen = {stretch.what for stretch in stretches}
    keys = [patch_key(SERVING, own)]
    keys += [patch_key(what, colour) for what, colour in _COLOURS.items() if what in seen]
    return keys + [
        line_key(what, colour, marker, "none")
        for what, (marker, colour, _) in _MARKERS.items()
        if what in seen
    ]


def _note(record: Record, seed: int | None, faults: Sequence[FaultTimes]) -> str:
    shown = f"The trial with seed {seed}" if seed is not None else "One trial"
    said = "; ".join(words.told(fault, start(record)) for fault in faults[:MOST_TOLD])
    more = len(faults) - MOST_TOLD
    rest = f"; and {more} more" if more > 0 else ""
    resumed = (
        ""
        if whole(record)
        else " It was resumed after an interruption: what is shown begins there."
    )
    return f"{shown}. {said[:1].upper()}{said[1:]}{rest}.{resumed}"
