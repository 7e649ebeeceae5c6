"""The kinds of disturbances: how each is carried out on a node that it hits, by the fault's class.

Kinds of one's own are entered here like those of dps, with `effect_of`. Kills and pauses have no
entry (`dps.chaos.kill_and_pause`), nor has damage to files, which hits no node
(`dps.chaos.files.damage`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dps.chaos.effect import Effect
from dps.chaos.files import Failures, FullDisk
from dps.chaos.network import FullStore, Interference, Remote
from dps.chaos.slow import Slowdown
from dps.cluster.names import Node
from dps.cluster.transport.links import BOTH, Closed, Late, Way
from dps.core.faults.plan import Cut, Delay, DiskFull, Lasting, Slow
from dps.core.names import STORE_ROLES
from dps.protocol.transport import Clock

if TYPE_CHECKING:
    from dps.cluster.backends.base import Act, Cluster
    from dps.cluster.driver.parameter_server import ParameterServer

F = TypeVar("F", bound=Lasting)

WAYS: dict[str, tuple[Way, ...]] = {"in": ("in",), "out": ("out",), "both": BOTH}


@dataclass(frozen=True)
class Hit:
    """A node that a fault hits, and how whoever carries the fault out can reach it.

    Attributes
    ----------
    number
        That of the fault in its plan.
    node
        The name of the node.
    cluster, ps
        The cluster that the node is of, and the parameter server on it.
    clock
        That of the record.
    failures
        The checkpoints that failed, as far as is known.
    """

    number: int
    node: str
    cluster: Cluster
    ps: ParameterServer
    clock: Clock
    failures: Failures

    @property
    def pid(self) -> int:
        """The number of the node's process."""
        return self.cluster.pids[self.node]

    @property
    def member(self) -> Node:
        """The node as the parameter server knows it; raises `LookupError` if it is gone."""
        for node in self.ps.nodes:
            if node.name == self.node and not self.cluster.gone(self.node, 0.0):
                return node
        raise LookupError("there is no such process")

    @property
    def remote(self) -> Remote:
        """The node's process, to have functions run in it; raises `LookupError` if it is gone."""
        return Remote(self.cluster.client, self.member.address, self.ps.group.coordinator)


@dataclass(frozen=True)
class _Kind:
    make: Callable[[Any, Hit], Effect]
    needs: tuple[Act, ...]


_KINDS: dict[type, _Kind] = {}


def effect_of(
    cls: type[F], needs: tuple[Act, ...] = ()
) -> Callable[[Callable[[F, Hit], Effect]], Callable[[F, Hit], Effect]]:
    """Enter how faults of a class are carried out: by the effect that the function returns.

    Parameters
    ----------
    cls
        The class of the faults; of one's own, derived from `dps.core.faults.plan.Disturbing`.
    needs
        What it must be possible to do to the process of a node. Where that is not so, a trial with
        such a fault does not begin.
    """

    def enter(make: Callable[[F, Hit], Effect]) -> Callable[[F, Hit], Effect]:
        _KINDS[cls] = _Kind(make, needs)
        return make

    return enter


def is_carried_out(cls: type) -> bool:
    """Whether it is known how faults of a class are carried out."""
    return cls in _KINDS


def made(fault: Lasting, hit: Hit) -> Effect:
    """Return the effect of a fault on a node; raises `LookupError` if it cannot be made."""
    if not is_carried_out(type(fault)):
        raise LookupError(f"nothing says how {type(fault).__name__} is carried out (effect_of)")
    return _KINDS[type(fault)].make(fault, hit)


def needs_of(fault: Lasting) -> tuple[Act, ...]:
    """Return what a fault needs to be able to do to the process of a node."""
    return _KINDS[type(fault)].needs if is_carried_out(type(fault)) else ()


# -- those of dps ----------------------------------------------------------------------------------


@effect_of(Slow, needs=("pause",))
def _slow(fault: Slow, hit: Hit) -> Effect:
    timings = hit.ps.group.timings
    silence = min(timings.lease, timings.stopped)
    return Slowdown(hit.cluster, hit.node, fault.factor, fault.seconds, silence)


@effect_of(Cut)
def _cut(fault: Cut, hit: Hit) -> Effect:
    return Interference(hit.remote, hit.number, Closed(WAYS[fault.direction]), fault.seconds)


@effect_of(Delay)
def _delay(fault: Delay, hit: Hit) -> Effect:
    return Interference(hit.remote, hit.number, Late(fault.delay), fault.seconds)


@effect_of(DiskFull, needs=("limit",))
def _disk_full(fault: DiskFull, hit: Hit) -> Effect:
    member = hit.member
    if member.role in STORE_ROLES:
        return FullStore(hit.remote, hit.number, fault.seconds)
    serves = partial(_shards, hit.ps, member.address)
    return FullDisk(hit.pid, serves, hit.failures, hit.clock)


def _shards(ps: ParameterServer, address: str) -> set[int]:
    """The shards that a node serves now."""
    views = ps.table().views
    return {view.shard for view in views if address in {m.address for m in view.chain}}
