"""The expansion of random and recurring faults into a plan of single faults.

Draws depend only on the seed and the position of the entry, so all strategies of a seed have the
same moments, however long each takes to recover.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from dps.core.names import role_of
from dps.errors import ConfigurationError
from dps.faults import (
    After,
    Among,
    AtSeconds,
    AtUpdates,
    Between,
    Every,
    Fault,
    FaultPlan,
    InChain,
    Kill,
    Lasting,
    Seat,
)

MAX_FAULTS = 1000

# An entry that is a plan is a recorded trace; each of its faults hits its target or the target's
# replacement. The number in an `After` is the index of an entry here, and of a fault in a plan.
Entry = Fault | FaultPlan


def expand(entries: Sequence[Entry], seed: int, names: Sequence[str] = ()) -> FaultPlan:
    """Return the plan of single faults of entries; equal seeds give equal plans.

    An `After` refers to the first fault of an entry.

    Parameters
    ----------
    names
        The nodes at the start, for `Among("each", …)`.

    Raises
    ------
    ConfigurationError
        The plan would have more than 1,000 faults.

    Examples
    --------
    >>> plan = expand([Kill("server-0", Every(updates=100, until=300))], seed=0)
    >>> [str(fault.when) for fault in plan]
    ['at 112 updates', 'at 283 updates']
    """
    parts = [
        tuple(_faults(entry, names, random.Random(f"seed {seed}, entry {number} of the faults")))
        for number, entry in enumerate(entries)
    ]
    first = [0, *accumulate(map(len, parts))]
    if first[-1] > MAX_FAULTS:
        raise ConfigurationError(
            f"the plan has {first[-1]:,} faults with all recurrences; expected {MAX_FAULTS:,} at "
            "most"
        )
    return tuple(_renumbered(fault, first) for part in parts for fault in part)


def _faults(entry: Entry, names: Sequence[str], rng: random.Random) -> Iterator[Fault]:
    if isinstance(entry, tuple):
        yield from map(_at_place, entry)
    elif isinstance(entry.when, Between):
        low, high = entry.when.low, entry.when.high
        if entry.when.unit == "updates":
            yield replace(entry, when=AtUpdates(rng.randrange(int(low), int(high))))
        else:
            yield replace(entry, when=AtSeconds(low + (high - low) * rng.random()))
    elif isinstance(entry.when, Every):
        if isinstance(entry.target, Among) and entry.target.pick == "each":
            of_all = rng.getrandbits(64)
            # The moments of a node depend on its name, and not on other nodes.
            for name in (name for name in names if role_of(name) == entry.target.role):
                fault = replace(entry, target=Seat(name))
                own = random.Random(f"{of_all}, {fault.whom}")
                yield from _recurrences(fault, entry.when, own)
        else:
            yield from _recurrences(_at_place(entry), entry.when, rng)
    else:
        yield entry


def _recurrences(fault: Fault, every: Every, rng: random.Random) -> Iterator[Fault]:
    # A kill may hit another node while the last one is still down.
    another = isinstance(fault, Kill) and isinstance(fault.target, Among | InChain)
    lasts = 0.0
    if every.unit == "seconds" and not another:
        if isinstance(fault, Kill):
            lasts = fault.back_after or 0.0
        elif isinstance(fault, Lasting):
            lasts = fault.seconds
    scale = every.mean / math.gamma(1 + 1 / every.shape)
    now, free = rng.weibullvariate(scale, every.shape), 0.0
    for _ in range(MAX_FAULTS):
        if now > every.until:
            return
        if now >= free:  # a node that is down cannot fail
            at: AtSeconds | AtUpdates = AtSeconds(now, optional=True)
            if every.unit == "updates":
                at = AtUpdates(max(1, math.ceil(now)), optional=True)
            yield replace(fault, when=at)
            free = now + lasts
        now += rng.weibullvariate(scale, every.shape)
    if now <= every.until:
        raise ConfigurationError(
            f"{fault.action} of {fault.whom}: more than {MAX_FAULTS} faults {every}; expected a "
            "larger mean"
        )


def _at_place(fault: Fault) -> Fault:
    """Make a fault on a named node hit its replacements too, which have other names."""
    return replace(fault, target=Seat(fault.target)) if isinstance(fault.target, str) else fault


def _renumbered(fault: Fault, first: Sequence[int]) -> Fault:
    """Make an `After` count faults instead of entries."""
    if not isinstance(fault.when, After):
        return fault
    return replace(fault, when=replace(fault.when, fault=first[fault.when.fault]))
