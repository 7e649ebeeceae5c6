"""Whether the faults of a plan can be done to the nodes of a cluster, before any of them is.

Signals reach the processes of this machine only, so on a cluster of several machines some faults
are possible on some nodes. Where it is known only later whom a fault hits, every node counts that
it might hit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dps.chaos.kinds import needs_of
from dps.cluster.backends.base import Act, Cluster
from dps.core.faults.plan import (
    Among,
    Corrupt,
    DiskFull,
    During,
    Fault,
    FaultPlan,
    Kill,
    Pause,
    Seat,
)
from dps.core.names import original, role_of

_SERVING = ("server", "replica", "spare")
_KEEPS_IN_MEMORY = "store"


def obstacles(plan: FaultPlan, cluster: Cluster, names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the number of each fault that cannot be done, and why.

    Parameters
    ----------
    names
        The nodes that there are when the plan begins.
    """
    for number, fault in enumerate(plan):
        for name in _may_be_hit(fault, names):
            reason = next((r for a in _acts(fault, name) if (r := cluster.obstacle(name, a))), None)
            if reason is not None:
                yield number, reason
                break


def _acts(fault: Fault, name: str) -> Iterator[Act]:
    match fault:
        case Kill(by=way):
            yield "kill" if way == "signal" else way
        case Pause():
            yield "pause"
        case DiskFull() if role_of(name) == _KEEPS_IN_MEMORY:
            return  # it is asked to refuse
        case Corrupt():
            return
        case _:
            yield from needs_of(fault)
    if isinstance(fault, Kill) and isinstance(fault.when, During):
        yield "pause"  # it is held until it is sure that the moment lasts


def _may_be_hit(fault: Fault, names: Sequence[str]) -> list[str]:
    match fault.target:
        case _ if isinstance(fault, Corrupt):
            return []
        case str(name) | Seat(name):
            named = {original(name)}
        case tuple(several):
            named = {original(name) for name in several}
        case Among(role=str(role)):
            named = {name for name in names if role_of(name) == role}
        case Among(shard=None):
            named = set(names)
        case _:
            named = {name for name in names if role_of(name) in _SERVING}
    return [name for name in names if name in named]
