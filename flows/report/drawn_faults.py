"""The moments of faults that were drawn from the seeds, for who reads or repeats an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dps.errors import ConfigurationError
from flows.config.faults.text import line
from flows.records.record import Record
from flows.records.settings import trial_from

MOST_MOMENTS = 12


@dataclass(frozen=True, slots=True)
class DrawnFaults:
    """What one seed has drawn, and for how many of its trials."""

    seed: int
    faults: tuple[str, ...]
    trials: int


def drawn_faults(records: Sequence[Record]) -> list[DrawnFaults]:
    """Return for each seed the faults whose moments it draws, as the plan has them.

    Strategies of a seed have the same moments, so there is a line for each seed, and for each plan
    if there are several. A record of another version, whose plan is not known here, has none.
    """
    found: dict[tuple[int, tuple[str, ...]], int] = {}
    for record in records:
        try:
            trial = trial_from(record.started.settings if record.started else {}, "the record")
        except ConfigurationError:
            continue
        told = tuple(map(line, trial.config.drawn_faults))
        if told:
            key = trial.seed, told
            found[key] = found.get(key, 0) + 1
    return [
        DrawnFaults(seed, _shortened(told), count) for (seed, told), count in sorted(found.items())
    ]


def _shortened(told: tuple[str, ...]) -> tuple[str, ...]:
    more = len(told) - MOST_MOMENTS
    return (*told[:MOST_MOMENTS], *([f"and {more:,} more"] if more > 0 else []))
