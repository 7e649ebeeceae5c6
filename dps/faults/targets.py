"""The nodes that a fault hits, looked up when it is due, and whether it is possible there."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dps.cluster.backends.base import Act, Cluster
from dps.cluster.names import SERVING
from dps.core.names import original, replacement, role_of
from dps.faults import Among, During, Fault, FaultPlan, InChain, Kill, Seat
from dps.protocol.messages import Table

if TYPE_CHECKING:
    from dps.cluster.driver.parameter_server import ParameterServer

NOT_A_NODE = "scheduler"


class Targets:
    """Looks up targets on a cluster with a parameter server. Thread-safe."""

    def __init__(self, nodes: Cluster, ps: ParameterServer, seed: int) -> None:
        self._nodes = nodes
        self._ps = ps
        self._seed = seed

    def of(self, number: int, fault: Fault, table: Table | None = None) -> tuple[str, ...]:
        """Return the names of the nodes to hit, if any; a known `table` saves a request."""
        match fault.target:
            case int(shard):
                return (f"shard-{shard}",)
            case str(name):
                return (name,)
            case tuple(names):
                return names
            case Seat(name):
                return (self._holder(name),)
            case InChain(shard, position):
                chain = self._chains(table)[shard]
                if position == "middle" and len(chain) < 3:
                    return ()
                places = {"head": 0, "middle": len(chain) // 2, "tail": len(chain) - 1}
                at = places[position] if isinstance(position, str) else position
                return tuple(chain[at : at + 1])
            case Among(pick, role, in_shard):
                here = self._candidates(role, in_shard, table)
                if pick != "random" or not here:
                    return tuple(here)
                return (random.Random(f"seed {self._seed}, fault {number}").choice(here),)

    def heads(self, table: Table) -> dict[int, str]:
        """Return the name of each shard's head, where there is one."""
        chains = enumerate(self._chains(table))
        return {shard: chain[0] for shard, chain in chains if chain}

    def _chains(self, table: Table | None) -> list[list[str]]:
        names = {node.address: node.name for node in self._ps.nodes}
        views = (table or self._ps.table()).views
        return [[names[r.address] for r in v.chain if r.address in names] for v in views]

    def _holder(self, name: str) -> str:
        """The newest node in the place of `name`, dead or alive."""
        while replacement(name) in self._nodes.pids:
            name = replacement(name)
        return name

    def _candidates(self, role: str | None, shard: int | None, table: Table | None) -> list[str]:
        if shard is not None:
            return self._chains(table)[shard]
        nodes = (name for name in self._nodes.pids if name != NOT_A_NODE)
        living = (name for name in nodes if not self._nodes.gone(name, 0.0))
        return sorted(name for name in living if role is None or role_of(name) == role)


def obstacles(plan: FaultPlan, cluster: Cluster, names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the number of each fault that is impossible on the nodes of a cluster, and why.

    For example, signals reach only processes of this machine. `names` are the nodes at the start of
    the plan; every one that a fault might hit counts.
    """
    for number, fault in enumerate(plan):
        needed = ((name, act) for name in _may_be_hit(fault, names) for act in _acts(fault))
        reasons = (cluster.obstacle(name, act) for name, act in needed)
        reason = next((each for each in reasons if each is not None), None)
        if reason is not None:
            yield number, reason


def _acts(fault: Fault) -> tuple[Act, ...]:
    if isinstance(fault, Kill):
        way: Act = "kill" if fault.by == "signal" else fault.by
        # The process is held while the phase is checked.
        return (way, "pause") if isinstance(fault.when, During) else (way,)
    return fault.needs


def _may_be_hit(fault: Fault, names: Sequence[str]) -> list[str]:
    match fault.target:
        case int():
            return []
        case str(name) | Seat(name):
            return [each for each in names if each == original(name)]
        case tuple(several):
            return [each for each in names if each in map(original, several)]
        case Among(role=str(role)):
            return [each for each in names if role_of(each) == role]
        case Among(shard=None):
            return list(names)
    return [each for each in names if role_of(each) in SERVING]
