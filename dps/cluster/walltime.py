"""Owns how long a job may run, in the formats of queueing systems, and what its node is told of it.

The node gets a lifetime a little shorter than that, and takes notice of its end well before
(`dps.cluster.leaving`). Jobs are started together, so lifetimes are spread: not all nodes leave at
once.
"""

from __future__ import annotations

SPREAD = 0.05
MOST_SPREAD = 300.0

# The units of what is between colons, by how many of them there are: 30 is half an hour to Slurm.
_HOURS = (3600, 60, 1)
_MINUTES_ALONE = {1: (60,), 2: (60, 1), 3: _HOURS}
_SECONDS_ALONE = {1: (1,), 2: (60, 1), 3: _HOURS}
_UNITS = {
    "slurm": _MINUTES_ALONE,
    "pbs": _SECONDS_ALONE,
    "sge": _SECONDS_ALONE,
    "lsf": {1: (60,), 2: (3600, 60), 3: _HOURS},
}


def seconds_of(kind: str, walltime: str) -> float | None:
    """How many seconds a walltime is to a queueing system; None: it cannot be told."""
    days, dash, clock = walltime.strip().rpartition("-")
    numbers = clock.split(":")
    units = _HOURS[: len(numbers)] if dash else _UNITS[kind].get(len(numbers), ())
    if len(units) != len(numbers) or not all(n.isdecimal() for n in (*numbers, days or "0")):
        return None
    return 86400.0 * int(days or 0) + sum(int(n) * u for n, u in zip(numbers, units, strict=True))


def lifetime_options(kind: str, walltime: str | None) -> tuple[str, ...]:
    """The options of `dask worker` by which a node ends before its job does; none without a limit.

    Its lifetime is drawn from 85% to 95% of the walltime, or from 15 to 5 minutes less than it if
    that is longer.
    """
    seconds = seconds_of(kind, walltime) if walltime is not None else None
    if not seconds:
        return ()
    spread = min(SPREAD * seconds, MOST_SPREAD)
    lifetime = seconds - 2 * spread
    return ("--lifetime", f"{lifetime:.0f}s", "--lifetime-stagger", f"{spread:.0f}s")
