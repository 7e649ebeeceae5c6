"""The shrinking of a schedule that breaks a promise to the faults that it takes."""

from __future__ import annotations

from dps.sim.schedules.schedule import Schedule
from dps.sim.simulate import Record, simulate


def shrink(record: Record) -> Record:
    """Leave out all that the violation does not need; return the record of what remains.

    Faults are left out in halves first, then one by one, then the bad weather. What remains must
    break the same kind of promise: with any other, it would be another story.
    """
    smallest = record
    part = len(record.schedule.faults)
    while part:
        begin = 0
        while begin < len(smallest.schedule.faults):
            count = len(smallest.schedule.faults)
            rest = [i for i in range(count) if not begin <= i < begin + part]
            less = _same(record, smallest.schedule.only(rest))
            if less is None:
                begin += part
            else:
                smallest = less
        part //= 2
    return _same(record, smallest.schedule.calmed()) or smallest


def _same(record: Record, schedule: Schedule) -> Record | None:
    """What comes of a schedule, if it breaks the same promise."""
    again = simulate(schedule)
    known = record.violation
    assert known is not None
    same = again.violation is not None and again.violation.kind == known.kind
    return again if same else None
