"""The description of one server group: what its hosts, workers and coordinator agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dps.core.blocks import Layout
from dps.core.consistency import Consistency
from dps.core.filters.chain import FilterChain
from dps.core.functions import Function
from dps.core.recovery import Chain, Checkpoint, Recovery
from dps.core.rules.rule import UpdateRule
from dps.protocol.transport import Endpoint


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of the protocol, all in seconds.

    Attributes
    ----------
    call
        Deadline of one call.
    copy
        Deadline of a call that carries a whole shard.
    patience
        How long a head holds a request that the consistency model makes wait, before it tells the
        client to ask again; less than `call`.
    retry
        Pause before something that failed is tried again.
    unavailable
        How long a client waits for a shard that is down before it gives up.
    flush
        How often recorded events are sent on.
    lease
        How long a host or worker that is not heard of is counted on.
    last_copy
        How long a host that is not heard of, but may live, is waited for if it holds the only copy
        of a state that must not be lost.
    """

    call: float = 5.0
    copy: float = 60.0
    patience: float = 2.0
    retry: float = 0.05
    unavailable: float = 120.0
    flush: float = 0.25
    lease: float = 1.0
    last_copy: float = 30.0


@dataclass(frozen=True, slots=True)
class Group:
    """One parameter server: its name, how its parameters lie, and what was chosen for it.

    `incarnations` are those of workers that took part before it was brought up again; `recorded`
    tells whether anybody listens to its events; `filters` are those of each array that has any.
    `servers` is how many nodes hold shards at first; None: one for each replica, and nothing is
    moved until somebody asks for it. `functions` can be run on its shards, by name. `labels` go
    with what its processes say of themselves. `on_loss` is what follows when acknowledged updates
    are lost: "warn", "raise" or "ignore".
    """

    name: str
    layout: Layout
    rule: UpdateRule
    consistency: Consistency
    recovery: Recovery
    coordinator: Endpoint
    timings: Timings = Timings()
    incarnations: dict[str, int] = field(default_factory=dict)
    recorded: bool = True
    filters: dict[str, FilterChain] = field(default_factory=dict)
    servers: int | None = None
    functions: Mapping[str, Function] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    on_loss: str = "warn"

    @property
    def replicas(self) -> int:
        """How many replicas each shard has."""
        return self.recovery.durability.replicas


def applies(group: Group) -> bool:
    """Whether the shards of a group go back together."""
    durability = group.recovery.durability
    return isinstance(durability, Checkpoint) and durability.scope == "all"


def aggregate(group: Group) -> int:
    """How many updates of the group are summed into one; 1: each is applied by itself."""
    durability = group.recovery.durability
    return durability.aggregate if isinstance(durability, Chain) else 1
