"""What a broken variant is, and which strategies it concerns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import getattr_static
from typing import Any, TypeVar

from dps.core.consistency import ASP, BSP
from dps.core.outage import Continue
from dps.protocol.durabilities.worker_cache import WorkerCache
from dps.sim.patches import Patch
from dps.sim.schedules.strategies import Case

Broken = TypeVar("Broken", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing that is done wrong, by what is in another's place.

    `about` says what, in a sentence; `concerns` tells whether a strategy has the part at all. It
    may take a `wide` schedule to find it out, or a `watched` one. One that `raises` shows in an
    error that it leads to.
    """

    name: str
    about: str
    patches: tuple[Patch, ...]
    concerns: Callable[[Case], bool]
    wide: bool = False
    raises: bool = False
    watched: bool = False


VARIANTS: dict[str, Variant] = {}


def instead_of(
    target: Any,
    attribute: str,
    name: str,
    concerns: Callable[[Case], bool],
    wide: bool = False,
    raises: bool = False,
    watched: bool = False,
) -> Callable[[Broken], Broken]:
    """Enter a function in the table of variants; several make one if they have one name."""

    def enter(by: Broken) -> Broken:
        is_property = isinstance(getattr_static(target, attribute), property)
        patch = Patch(target, attribute, property(by) if is_property else by)
        about = (by.__doc__ or "").strip().splitlines()[0]
        known = VARIANTS.get(name, Variant(name, about, (), concerns, wide, raises, watched))
        VARIANTS[name] = replace(known, patches=(*known.patches, patch))
        return by

    return enter


def chains(case: Case) -> bool:
    """Where a shard has several replicas."""
    return case.recovery.durability.replicas > 1


def checkpoints(case: Case) -> bool:
    """Where states are written to files."""
    return case.recovery.durability.writes_checkpoints


def stores(case: Case) -> bool:
    """Where states are in the state store."""
    return case.recovery.durability.needs_store


def mailboxes(case: Case) -> bool:
    """Where gradients are buffered on the mailbox's node."""
    return isinstance(case.recovery.outage, Continue) and case.recovery.outage.buffer == "mailbox"


def buffers(case: Case) -> bool:
    """Where workers go on while a shard is down."""
    return isinstance(case.recovery.outage, Continue)


def gated(case: Case) -> bool:
    """Where workers wait for one another."""
    return not isinstance(case.consistency, ASP)


def sums(case: Case) -> bool:
    """Where updates are summed before they go down a chain."""
    return chains(case) and case.recovery.durability.aggregate > 1


def filters(case: Case) -> bool:
    """Where gradients are filtered."""
    return bool(case.filters)


def pull_filters(case: Case) -> bool:
    """Where what workers pull is filtered."""
    return bool(case.pull_filters)


def filters_resent(case: Case) -> bool:
    """Where filtered gradients are sent again after all shards have gone back."""
    durability = case.recovery.durability
    return filters(case) and durability.restores_together


def filters_buffered(case: Case) -> bool:
    """Where filtered gradients are buffered."""
    return filters(case) and buffers(case)


def alone(case: Case) -> bool:
    """Shards of one replica, which are copied only to be moved."""
    return not chains(case)


def calls(case: Case) -> bool:
    """Where functions run on shards."""
    return case.calls


def rounds(case: Case) -> bool:
    """Where updates wait to be applied together."""
    return isinstance(case.consistency, BSP) or sums(case)


def caches(case: Case) -> bool:
    """Where states live on in what workers have read."""
    return isinstance(case.recovery.durability, WorkerCache)


def adaptive(case: Case) -> bool:
    """Where the interval of checkpoints is chosen by what is seen."""
    return getattr(case.recovery.durability, "every", None) == "auto"


def in_parts(case: Case) -> bool:
    """Where checkpoints hold a part of a shard."""
    return case.recovery.durability.restores_in_parts


def timed(case: Case) -> bool:
    """Where checkpoints are promised in seconds."""
    return case.recovery.durability.seconds is not None


def cuts(case: Case) -> bool:
    """Where all shards go back together."""
    return case.recovery.durability.restores_together


def two_stores(case: Case) -> bool:
    """Where each state is in several stores."""
    return case.recovery.durability.stores > 1


def mail_in_two_stores(case: Case) -> bool:
    """Where each state, and each buffered gradient, is in several stores."""
    return two_stores(case) and mailboxes(case)


def layered(case: Case) -> bool:
    """Where checkpoints are written below what acks wait for."""
    return case.recovery.durability.has_layer_below


def layered_chains(case: Case) -> bool:
    """Where they are written below a chain."""
    return layered(case) and chains(case)


def layered_stores(case: Case) -> bool:
    """Where they are written below the state store."""
    return layered(case) and stores(case)


def spread(case: Case) -> bool:
    """Where any server may hold any shard."""
    return case.servers is not None


def rings(case: Case) -> bool:
    """Where shards are placed by consistent hashing."""
    return case.placement is not None


def held_back(case: Case) -> bool:
    """Where workers hold updates back that may be too late."""
    return gated(case) and buffers(case) and not mailboxes(case)


def any_case(case: Case) -> bool:
    """Everywhere."""
    return True
