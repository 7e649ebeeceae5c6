"""The drawing of schedules from seeds: the seed's own, those of a series, and those named."""

from __future__ import annotations

import difflib
from dataclasses import replace
from random import Random

from dps.errors import ConfigurationError
from tests.simulator.network import Weather
from tests.simulator.schedules.schedule import (
    CALM,
    NOTHING,
    WATCHED,
    WIDE,
    Fault,
    Schedule,
)
from tests.simulator.schedules.stories import (
    KEEPER_BACK_SECONDS,
    LONGER_THAN_ANYBODY_WAITS,
    Draw,
    changed,
    late_replies,
    of_drained_store,
    of_keepers,
    of_store_out_of_reach,
    surroundings,
    widened,
)
from tests.simulator.schedules.stories import watched as with_monitors
from tests.simulator.schedules.strategies import CASES, Case

DELAYS = ((0.0002, 0.005), (0.002, 0.02))
LOSSES = {"train": 0.04, "replicate": 0.04, "store": 0.04, "control": 0.02}
WORK = (0.02, 0.2)
THINK = (0.03, 0.12)
WITH_TABLES = 0.4
WITH_LATE_REPLIES = 0.1
SERIES = 1_000_000  # seeds of one series


def schedule(case: Case, seed: int, wide: bool = False, watched: bool = False) -> Schedule:
    """The schedule of a case that a seed stands for.

    With `wide`, what came to the simulator later is drawn as well, and with `watched` what has to
    do with monitors, from streams of their own: without them a seed stands for what it always did.
    """
    drawn = _widened(case, seed) if wide else _narrow(case, seed)
    if not watched:
        return drawn
    faults = with_monitors(Draw(case, Random(f"{case.name}/{seed}/watched")), drawn.faults)
    return replace(drawn, watched=True, faults=_over_in_time(faults))


def _over_in_time(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Limit the faults of a schedule in which a server cannot reach a store for long.

    A node that stays down would leave its shards without a server. If another store or mailbox is
    hit, that server may need the first one. Workers make their last updates when all faults are
    over, and under SSP a worker that joins waits for them. So in both cases the store is back soon.
    """
    others = [fault for fault in faults if fault.lasts != LONGER_THAN_ANYBODY_WAITS]
    if len(others) == len(faults):
        return faults
    back_soon = any(fault.whom.role in ("store", "mailbox", "worker") for fault in others)

    def lasts(fault: Fault) -> float | None:
        if fault.lasts == LONGER_THAN_ANYBODY_WAITS:
            return KEEPER_BACK_SECONDS if back_soon else fault.lasts
        return fault.lasts or 0.5 if fault.kind == "crash" else fault.lasts

    return tuple(replace(fault, lasts=lasts(fault)) for fault in faults)


def _widened(case: Case, seed: int) -> Schedule:
    drawn = _narrow(case, seed)
    random = Random(f"{case.name}/{seed}/wide")
    drawn = replace(drawn, wide=True, **surroundings(case, random, drawn.extra))
    drained = of_drained_store(Draw(case, Random(f"{case.name}/{seed}/drain of a store")))
    if drained is not None:
        another = f"store-{case.recovery.stores}"
        return replace(drawn, faults=drained, extra=(*drawn.extra, another))
    cut_off = of_store_out_of_reach(Draw(case, Random(f"{case.name}/{seed}/store out of reach")))
    if cut_off is not None:  # and nobody else could take the shard over
        return replace(drawn, faults=cut_off, extra=tuple(set(drawn.extra) & {"mailbox-0"}))
    kept = of_keepers(Draw(case, Random(f"{case.name}/{seed}/state store")))
    return replace(drawn, faults=kept or widened(Draw(case, random), drawn))


def _narrow(case: Case, seed: int) -> Schedule:
    weather, durability = Random(f"{case.name}/{seed}/weather"), case.recovery.durability
    faults = Draw(case, Random(f"{case.name}/{seed}/faults")).faults()
    changes = Draw(case, Random(f"{case.name}/{seed}/changes"))
    lossy, twice = weather.random() < 0.3, weather.random() < 0.2
    late = Draw(case, Random(f"{case.name}/{seed}/late"))
    overdue = late_replies(late) if late.random.random() < WITH_LATE_REPLIES else []
    return Schedule(
        case,
        seed,
        Weather(weather.choice(DELAYS), LOSSES if lossy else {}, 0.1 if twice else 0.0),
        (*changed(changes, faults), *overdue),
        think=case.think or (0.01 if case.busy else weather.choice(THINK)),
        work=weather.choice(WORK),
        inline=weather.random() < 0.5,
        skewed=weather.random() < 0.5,
        extra=_extra(case, weather),
        told=weather.random() < 0.85,
        tables=weather.random() < WITH_TABLES and durability.refusal("tables") is None,
    )


def numbered(number: int, series: int = 0) -> Schedule:
    """One of a series of schedules that goes through all cases in turn, seed by seed.

    Every second seed's are wide, and of four seeds the last two are watched.
    """
    seed, which = divmod(number, len(CASES))
    chosen = list(CASES.values())[which]
    return schedule(chosen, series * SERIES + seed, wide=seed % 2 == 1, watched=seed % 4 > 1)


def named(name: str) -> Schedule:
    """The schedule of that name (see `Schedule.name`); raises `ConfigurationError`."""
    case, seed, *rest = (*name.split(":"), "")
    if case not in CASES:
        near = difflib.get_close_matches(case, CASES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigurationError(f"there is no case {case!r}; {hint}there are: {'; '.join(CASES)}")
    options = [part for part in rest if part]
    numbers = [part for part in options if part not in (CALM, WIDE, WATCHED)]
    try:
        drawn = schedule(CASES[case], int(seed), WIDE in options, WATCHED in options)
        for listed in numbers:
            drawn = drawn.only(int(n) for n in listed.split(",") if n != NOTHING)
    except (ValueError, IndexError):
        raise ConfigurationError(
            f"{name!r} is no schedule: expected <case>:<seed>, or <case>:<seed>:<faults>, as in "
            "'chain(2):1234' or 'chain(2):1234:0,2'"
        ) from None
    return drawn.calmed() if CALM in options else drawn


def _extra(case: Case, random: Random) -> tuple[str, ...]:
    """Spares that can take over at once, and a node of the mailboxes' own."""
    spares = tuple(f"spare-{i}" for i in range(random.choice((0, 0, 1, 2))))
    if case.recovery.stores and random.random() < 0.5:
        return (*spares, "mailbox-0")
    return spares
