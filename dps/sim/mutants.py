"""Owns the hunt for broken variants of the protocol: the proof that the checks check something.

Each variant (`dps.sim.variants`) leaves one thing out that the protocol needs. The same random
schedules that find nothing wrong with the shipped code must find something wrong with every one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from dps.sim.cases import CASES
from dps.sim.draw import numbered
from dps.sim.faults import Schedule
from dps.sim.simulate import Record, simulate
from dps.sim.variants import VARIANTS, Variant

__all__ = ["BUDGET", "VARIANTS", "Caught", "hunt", "in_place"]

BUDGET = 2000


@dataclass(frozen=True, slots=True)
class Caught:
    """The schedule that found a variant out, and how many came before it, with it counted."""

    record: Record
    after: int


@contextmanager
def in_place(variant: Variant) -> Iterator[None]:
    """Have the shipped code replaced by a broken variant of it."""
    right = getattr(variant.target, variant.attribute)
    setattr(variant.target, variant.attribute, variant.by)
    try:
        yield
    finally:
        setattr(variant.target, variant.attribute, right)


def hunt(variant: Variant, budget: int = BUDGET, first: Iterable[Schedule] = ()) -> Caught | None:
    """Run schedules until one catches the variant; None: none did.

    Parameters
    ----------
    budget
        How many of `dps simulate`'s own schedules are tried, from seed 0 on. Those of strategies
        without the part that is broken count, but need not be run: they cannot tell.
    first
        Schedules that are tried before.
    """
    with in_place(variant):
        for schedule in first:
            record = simulate(schedule)
            if record.violation is not None:
                return Caught(record, 1)
        for number in count():
            if number >= budget:
                return None
            schedule = numbered(number)
            if variant.concerns(schedule.case):
                record = simulate(schedule)
                if record.violation is not None:
                    return Caught(record, number + 1)
    raise AssertionError("a count does not end")


def seeds_tried(budget: int) -> int:
    """How many seeds of each strategy are among so many schedules."""
    return -(-budget // len(CASES))
