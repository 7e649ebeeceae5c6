"""The description of one server group: what its hosts, workers and coordinator agree on."""

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
from dps.recovery.manifest import Run
from dps.recovery.strategy import Recovery


@dataclass(frozen=True, slots=True)
class Group:
    """One parameter server: its name, how its parameters lie, and what was chosen for it.

    `incarnations` are those of workers that took part before it was brought up again; `recorded`
    tells whether anybody listens to its events; `filters` are those of each array that has any,
    and `pull_filters` those of the weights that workers pull.
    `servers` is how many nodes hold shards at first; None: one for each replica, and nothing is
    moved until somebody asks for it. `functions` can be run on its shards, by name. `labels` go
    with what its processes say of themselves. `on_loss` is what follows when acknowledged updates
    are lost: "warn", "raise" or "ignore". `transport` is by what its processes call each other.
    `placement` says which of the `servers` holds which shard; None: whichever has the fewest.
    `instance` is drawn for each group: on virtual time names are the same again in every run.
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
        """How many replicas each shard has."""
        return self.recovery.durability.replicas

    @property
    def aggregate(self) -> int:
        """How many updates are summed into one; 1: each is applied by itself."""
        return self.recovery.durability.aggregate

    @property
    def restores_together(self) -> bool:
        """Whether all shards go back when one is lost."""
        return self.recovery.durability.restores_together

    def as_run(self, generation: int, started: float, about: str) -> Run:
        """Return what is written beside the group's checkpoints, to resume from them."""
        return Run(
            self.name,
            generation,
            started,
            self.layout,
            self.rule,
            self.consistency,
            self.recovery,
            about,
            self.filters,
            self.servers,
            self.pull_filters,
            self.placement,
        )
