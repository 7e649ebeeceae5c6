"""The hunt for broken variants of the protocol: the proof that the checks check something.

Each variant (`dps.sim.broken.protocol` and those beside it) leaves one thing out that the protocol
needs. The same random schedules that find nothing wrong with the shipped code must find something
wrong with every one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dps.sim.broken import (  # noqa: F401 - what is in VARIANTS
    layers,
    lifecycle,
    monitors,
    payload,
    protocol,
    stores,
    tasks,
)
from dps.sim.broken.variant import VARIANTS, Variant
from dps.sim.patches import patched
from dps.sim.schedules.draw import numbered
from dps.sim.schedules.schedule import Schedule
from dps.sim.simulate import Record, simulate

__all__ = ["BUDGET", "VARIANTS", "Caught", "hunt"]

BUDGET = 10_000


@dataclass(frozen=True, slots=True)
class Caught:
    """The schedule that found a variant out, and how many came before it, with it counted."""

    record: Record
    after: int


def hunt(variant: Variant, budget: int = BUDGET, first: Iterable[Schedule] = ()) -> Caught | None:
    """Run schedules until one catches the variant; None: none did.

    Parameters
    ----------
    budget
        How many of `dps simulate`'s own schedules are tried, from seed 0 on. Those of strategies
        without the part that is broken count, but need not be run: they cannot tell. Nor can those
        that are not wide, or not watched, if it takes that.
    first
        Schedules that are tried before.
    """
    for schedule in first:
        record = _broken_only_by(variant, schedule)
        if record is not None:
            return Caught(record, 1)
    for number in range(budget):
        schedule = numbered(number)
        fits = (schedule.wide or not variant.wide) and (schedule.watched or not variant.watched)
        if fits and variant.concerns(schedule.case):
            record = _broken_only_by(variant, schedule)
            if record is not None:
                return Caught(record, number + 1)
    return None


def _broken_only_by(variant: Variant, schedule: Schedule) -> Record | None:
    """The record of a schedule that breaks a promise with the variant, and none without it.

    An error shows nothing of the checks, unless it is what the variant leads to.
    """
    with patched(*variant.patches):
        record = simulate(schedule)
    if record.violation is None or (record.violation.kind == "bug" and not variant.raises):
        return None
    return record if simulate(schedule).violation is None else None
