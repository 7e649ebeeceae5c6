"""Whom a fault hits: its target is looked up among the living nodes when the fault is due."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dps.cluster.backends.base import Cluster
from dps.core.faults.plan import Among, Corrupt, Fault, InChain, Seat
from dps.core.names import replacement
from dps.protocol.messages import Table

if TYPE_CHECKING:
    from dps.cluster.driver.parameter_server import ParameterServer

NOT_A_NODE = "scheduler"


class Targets:
    """Looks targets up. Thread-safe.

    Parameters
    ----------
    nodes, ps
        The cluster to break, and the parameter server on it.
    seed
        What is drawn at random follows from it and from the fault's number, given who lives.
    """

    def __init__(self, nodes: Cluster, ps: ParameterServer, seed: int) -> None:
        self._nodes = nodes
        self._ps = ps
        self._seed = seed

    def of(self, number: int, fault: Fault, table: Table | None = None) -> tuple[str, ...]:
        """Return the names of the nodes to hit; none if nobody is there to be hit.

        `table` is the routing table to go by, if it is known.
        """
        if isinstance(fault, Corrupt):
            return (f"shard-{fault.target}",)
        match fault.target:
            case str(name):
                return (name,)
            case tuple(names):
                return names
            case Seat(name):
                return self._holder(name)
            case InChain(shard, position):
                return _at(position, self._chains(table)[shard])
            case Among(pick, role, shard):
                here = self._candidates(role, shard, table)
                if pick == "all" or not here:
                    return tuple(here)
                return (random.Random(f"seed {self._seed}, fault {number}").choice(here),)

    def heads(self, table: Table) -> dict[int, str]:
        """The name of each shard's head, of those that have one."""
        chains = enumerate(self._chains(table))
        return {shard: chain[0] for shard, chain in chains if chain}

    def _chains(self, table: Table | None) -> list[list[str]]:
        """The names of each shard's replicas from head to tail."""
        names = {node.address: node.name for node in self._ps.nodes}
        views = (table or self._ps.table()).views
        return [[names[r.address] for r in v.chain if r.address in names] for v in views]

    def _holder(self, name: str) -> tuple[str, ...]:
        """The node that has the place of `name` now; its last holder if that one is dead."""
        pids = self._nodes.pids
        while replacement(name) in pids:
            name = replacement(name)
        return (name,)

    def _candidates(self, role: str | None, shard: int | None, table: Table | None) -> list[str]:
        if shard is not None:
            return self._chains(table)[shard]
        nodes = (name for name in self._nodes.pids if name != NOT_A_NODE)
        living = (name for name in nodes if not self._nodes.gone(name, 0.0))
        return sorted(name for name in living if role is None or name.startswith(f"{role}-"))


def _at(position: str | int, chain: Sequence[str]) -> tuple[str, ...]:
    """The replica at a position of a chain, which may be shorter than it should be."""
    match position:
        case "head":
            return tuple(chain[:1])
        case "tail":
            return tuple(chain[-1:])
        case "middle":
            return (chain[len(chain) // 2],) if len(chain) > 2 else ()
        case int():
            return tuple(chain[position : position + 1])
    raise AssertionError(position)
