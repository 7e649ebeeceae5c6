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
    """One parameter server: its name, the layout of its parameters, and the user's choices."""

    name: str
    layout: Layout
    rule: UpdateRule
    consistency: Consistency
    recovery: Recovery
    coordinator: Endpoint
    timings: Timings = Timings()
    incarnations: dict[str, int] = field(default_factory=dict)  # before the group was resumed
    recorded: bool = True  # whether anything listens to its events
    filters: dict[str, FilterChain] = field(default_factory=dict)  # of each array that has any
    servers: int | None = None  # None: one for each replica; no shard moves until a user scales
    functions: Mapping[str, Function] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)  # of its metrics and logs
    on_loss: str = "warn"  # or "raise", "ignore": the reaction to a loss of acknowledged updates
    transport: TransportChoice = "auto"
    pull_filters: dict[str, FilterChain] = field(default_factory=dict)
    placement: ConsistentHash | None = None  # None: a shard goes to the server with the fewest
    # Random for each group, because on virtual time names are the same in every run.
    instance: str = field(default_factory=lambda: secrets.token_hex(4), compare=False)

    @property
    def replicas(self) -> int:
        """Number of replicas of each shard."""
        return self.recovery.durability.above.replicas

    @property
    def aggregate(self) -> int:
        """Number of updates that are summed into one; 1: each is applied separately."""
        return self.recovery.durability.above.aggregate

    @property
    def restores_together(self) -> bool:
        """Whether all shards are restored when one is lost."""
        return self.recovery.durability.scope == "all"
