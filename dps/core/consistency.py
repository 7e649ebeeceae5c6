"""Owns the consistency models as data: how far workers may run ahead of one another.

The gates themselves are enforced at the shard (`dps.protocol.replica`) on the workers' clocks,
which are part of the shard's state (`dps.core.shard`). A worker's clock is the number of its last
applied update.
"""

from __future__ import annotations

from dataclasses import dataclass

from dps.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class BSP:
    """Bulk synchronous (bounded delay 0): updates of one round are applied together.

    A shard holds each worker's update until every active worker has sent one, then applies them
    in the order of the workers' names. Results do not depend on timing.
    """


@dataclass(frozen=True, slots=True)
class SSP:
    """Stale synchronous with bound `tau`, the paper's "maximal delayed time" (OSDI 2014, 3.4).

    A worker whose clock is more than `tau` ahead of the slowest active worker's waits before it
    reads weights for its next gradient.
    """

    tau: int

    def __post_init__(self) -> None:
        if self.tau < 0:
            raise ConfigurationError(f"SSP: tau={self.tau}, expected 0 or more updates")


@dataclass(frozen=True, slots=True)
class ASP:
    """Asynchronous: no worker ever waits for another (unbounded delay)."""


Consistency = BSP | SSP | ASP
