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
        _check_moment("kill", self.target, self.at_updates)
        if self.back_after is not None and self.back_after < 0:
            raise ConfigurationError(
                f"kill of {self.target}: back_after={self.back_after}, expected 0 s or more"
            )


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop the process of a node with SIGSTOP for a while; it then goes on where it was.

    Its connections stay open and its memory is kept, so nothing but its silence tells of it. One
    that is paused for longer than its lease comes back to a group that has gone on without it.

    Parameters
    ----------
    target
        The node's name, such as "server-0" (the head of shard 0 at the start).
    at_updates
        Pause as soon as the shards have applied this many updates (the least of them counts).
    seconds
        How long it is stopped.
    """

    target: str
    at_updates: int
    seconds: float = 2.0

    def __post_init__(self) -> None:
        _check_moment("pause", self.target, self.at_updates)
        if self.seconds <= 0:
            raise ConfigurationError(
                f"pause of {self.target}: seconds={self.seconds}, expected more than 0"
            )


Fault = Kill | Pause
FaultPlan = tuple[Fault, ...]


def _check_moment(kind: str, target: str, at_updates: int) -> None:
    if at_updates < 1:
        raise ConfigurationError(
            f"{kind} of {target}: at_updates={at_updates}, expected at least 1"
        )
