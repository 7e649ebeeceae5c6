"""Owns fault plans as data: what happens to whom, when, and when capacity comes back.

A plan is the same for a real cluster (`dps.chaos` carries it out) and for a simulated one.
"""

from __future__ import annotations

from dataclasses import dataclass

from dps.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the process of a node with SIGKILL.

    Parameters
    ----------
    target
        The node's name, such as "server-0" (the head of shard 0 at the start).
    at_updates
        Kill as soon as the shards have applied this many updates (the least of them counts).
    back_after
        Seconds until a fresh, empty node takes its place; None: never.
    """

    target: str
    at_updates: int
    back_after: float | None = 1.0

    def __post_init__(self) -> None:
        if self.at_updates < 1:
            raise ConfigurationError(
                f"kill of {self.target}: at_updates={self.at_updates}, expected at least 1"
            )
        if self.back_after is not None and self.back_after < 0:
            raise ConfigurationError(
                f"kill of {self.target}: back_after={self.back_after}, expected 0 s or more"
            )


FaultPlan = tuple[Kill, ...]
