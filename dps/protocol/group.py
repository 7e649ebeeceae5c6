"""The description of one server group, which its servers, workers and coordinator share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from dps.core.blocks import Layout
from dps.core.consistency import Consistency
from dps.core.filters.chain import FilterChain
from dps.core.functions import Function
from dps.core.placement import ConsistentHash
from dps.core.rules.rule import UpdateRule
from dps.protocol.timings import Timings
from dps.protocol.transport import Endpoint, TransportChoice
from dps.recovery.strategy import Recovery


@dataclass(frozen=True, slots=True)
class Group:
    """One parameter server: its name, the layout of its parameters, and the user's choices.

    Attributes
    ----------
    incarnations
        Those of workers that took part before the group was resumed.
    recorded
        Whether anything listens to its events.
    filters, pull_filters
        The filters of each array that has any: of pushed gradients, and of pulled weights.
    servers
        Number of nodes that hold shards at first; None: one for each replica, and no shard moves
        until a user scales the group.
    functions
        Those that can be called on its shards, by name.
    labels
        Added to the metrics and logs of its processes.
    on_loss
        The reaction to a loss of acknowledged updates: "warn", "raise" or "ignore".
    transport
        How its processes call each other.
    placement
        Which of the `servers` holds which shard; None: the one with the fewest.
    instance
        Random for each group, because on virtual time names are the same in every run.
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
    transport: TransportChoice = "auto"
    pull_filters: dict[str, FilterChain] = field(default_factory=dict)
    placement: ConsistentHash | None = None
    instance: str = field(default_factory=lambda: secrets.token_hex(4), compare=False)

    @property
    def replicas(self) -> int:
        """Number of replicas of each shard."""
        return self.recovery.durability.replicas

    @property
    def aggregate(self) -> int:
        """Number of updates that are summed into one; 1: each is applied by itself."""
        return self.recovery.durability.aggregate

    @property
    def restores_together(self) -> bool:
        """Whether all shards are restored when one is lost."""
        return self.recovery.durability.restores_together
