"""What a broken variant is, how one is declared, and the hunt, which proves the checks themselves.

The same random schedules that find nothing wrong with the shipped code must find something wrong
with every variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from inspect import getattr_static, iscoroutinefunction
from typing import Any, TypeVar

from dps.core.consistency import ASP, BSP
from dps.core.replay import Continue
from dps.recovery.worker_cache import WorkerCache
from tests.simulator.patches import Patch, patched
from tests.simulator.schedules.draw import numbered
from tests.simulator.schedules.schedule import Schedule
from tests.simulator.schedules.strategies import Case
from tests.simulator.simulate import Record, simulate

By = TypeVar("By", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing that is done wrong, by what is in another's place.

    `needs` are the parts of the protocol without which it cannot show (see `parts_of`), and
    "wide" or "watched" schedules. One that `raises` shows in an error that it leads to.
    """

    name: str
    patches: tuple[Patch, ...]
    needs: frozenset[str]
    raises: bool = False


VARIANTS: dict[str, Variant] = {}


def instead_of(
    target: Any, attribute: str, name: str, needs: str = "", raises: bool = False
) -> Callable[[By], By]:
    """Declare a variant, in which a function is in the place of the shipped one.

    It is called with that one, and then with what that one is called with. Several functions make
    one variant if they have one name.
    """

    def enter(by: By) -> By:
        shipped = getattr_static(target, attribute)
        is_property = isinstance(shipped, property)
        right = shipped.fget if is_property else getattr(target, attribute)

        def broken(*args: Any, **kwargs: Any) -> Any:
            return by(right, *args, **kwargs)

        patch = Patch(target, attribute, property(broken) if is_property else broken)
        known = VARIANTS.get(name, Variant(name, (), frozenset(needs.split()), raises))
        VARIANTS[name] = replace(known, patches=(*known.patches, patch))
        return by

    return enter


def always(target: Any, attribute: str, result: Any, name: str, needs: str = "") -> None:
    """Declare a variant that does nothing but return a result."""

    async def later(right: Any, *args: Any, **kwargs: Any) -> Any:
        return result

    def at_once(right: Any, *args: Any, **kwargs: Any) -> Any:
        return copy(result)

    waits = iscoroutinefunction(getattr(target, attribute))
    instead_of(target, attribute, name, needs)(later if waits else at_once)


@cache
def parts_of(case: Case) -> frozenset[str]:
    """The parts of the protocol that a strategy has, and that a variant may need."""
    durability, outage = case.recovery.durability, case.recovery.outage
    chains, gated = durability.above.replicas > 1, not isinstance(case.consistency, ASP)
    buffer = outage.buffer if isinstance(outage, Continue) else None
    sums = chains and durability.above.aggregate > 1
    parts = {
        "chains": chains,
        "alone": not chains,  # shards of one replica, which are copied only to be moved
        "sums": sums,  # updates are summed before they go down a chain
        "rounds": isinstance(case.consistency, BSP) or sums,
        "gated": gated,
        "checkpoints": durability.writes_checkpoints,
        "adaptive": getattr(durability, "every", None) == "auto",
        "timed": durability.seconds is not None,
        "cuts": durability.scope == "all",
        "in_parts": durability.restores_in_parts,
        "layered": durability.has_layer_below,
        "caches": isinstance(durability, WorkerCache),
        "stores": durability.above.stores > 0,
        "two_stores": durability.above.stores > 1,
        "buffers": buffer is not None,
        "mailboxes": buffer == "mailbox",
        "held_back": gated and buffer == "worker",
        "filters": bool(case.filters),
        "pull_filters": bool(case.pull_filters),
        "calls": case.calls,
        "leases": case.leases,
        "spread": case.servers is not None,
        "rings": case.placement is not None,
    }
    return frozenset(name for name, there in parts.items() if there)


# -- the hunt ------------------------------------------------------------------------------------

BUDGET = 10_000


@dataclass(frozen=True, slots=True)
class Caught:
    """The schedule that found a variant out, and how many came before it, with it counted."""

    schedule: str
    violation: str
    after: int


def hunt(variant: Variant, budget: int = BUDGET, first: Iterable[Schedule] = ()) -> Caught | None:
    """Run schedules until one catches the variant; None: none did.

    Parameters
    ----------
    budget
        How many of the simulator's own schedules are tried, from seed 0 on. Those that lack what
        the variant needs count, but are not run.
    first
        Schedules that are tried before.
    """
    for schedule in first:
        record = _broken_only_by(variant, schedule)
        if record is not None:
            return Caught(record.schedule.name, str(record.violation), 1)
    for number in range(budget):
        schedule = numbered(number)
        kinds = {kind for kind in ("wide", "watched") if getattr(schedule, kind)}
        if variant.needs <= parts_of(schedule.case) | kinds:
            record = _broken_only_by(variant, schedule)
            if record is not None:
                return Caught(schedule.name, str(record.violation), number + 1)
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
