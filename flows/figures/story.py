"""Owns the story of one trial as a timeline: shards and nodes in lanes, every fault, every recovery."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dps.events import CheckpointWritten, Killed, NodeJoined, Replayed, ReplicaAdded
from flows.figures.bars import RECOVERY_PARTS
from flows.figures.curves import SECONDS
from flows.figures.drawing import Drawing, Table
from flows.figures.style import (
    GRID,
    INK,
    MUTED,
    PART_COLOURS,
    Key,
    legend_above,
    line_key,
    panel,
    patch_key,
    row_axis,
)
from flows.figures.subject import Subject, Trial, end, start, whole
from flows.record import Record
from flows.summary import Group
from flows.timeline import FaultTimes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UP, STRUCK, AFFECTED = "up", "fault", "affected"
CHECKPOINT, REPLAYED, REPLICA = "checkpoint written", "buffered gradients replayed", "replica added"
_MARKERS = {STRUCK: ("X", INK), CHECKPOINT: ("|", MUTED), REPLAYED: ("^", INK), REPLICA: ("o", INK)}
_COLOURS = {UP: GRID, AFFECTED: "#c0362c", **dict(zip(RECOVERY_PARTS, PART_COLOURS, strict=True))}


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
    figure, axes = panel(height=1.1 + 0.22 * len(lanes))
    for stretch in stretches:
        _draw(axes, stretch, lanes.index(stretch.lane))
    row_axis(axes, lanes, [INK if lane.startswith("shard ") else MUTED for lane in lanes])
    axes.set_xlabel(SECONDS)
    axes.set_xlim(0, 1.01 * (end(record) - start(record)))
    legend_above(axes, _keys(stretches))
    return Drawing(
        name=subject.name("timeline", group.condition, group.strategy),
        title=f"{group.strategy}, {group.condition}" if group.condition else group.strategy,
        note=_note(record, outcome.identity.seed, outcome.faults),
        figure=figure,
        table=Table(
            ("lane", "what", "from", "to", "detail"),
            tuple((s.lane, s.what, s.begin, s.end, s.detail) for s in stretches),
        ),
        strategy=group.strategy,
    )


def _stretches(trial: Trial) -> Iterator[Stretch]:
    record, outcome = trial
    origin, last = start(record), end(record)
    for stretch in (*_shards(record, outcome.faults, last), *_nodes(record, outcome.faults, last)):
        begin, until = max(stretch.begin, origin), min(stretch.end, last)
        if begin <= until:
            yield Stretch(stretch.lane, stretch.what, begin - origin, until - origin, stretch.detail)


# -- lanes -------------------------------------------------------------------------------------


def _shards(record: Record, faults: Sequence[FaultTimes], last: float) -> Iterator[Stretch]:
    """Whether each shard served, how it came back, and what was done to its state."""
    known = sorted({event.shard for event in record.of(NodeServing)})
    yield from ()


def _nodes(record: Record, faults: Sequence[FaultTimes], last: float) -> Iterator[Stretch]:
    yield from ()
