"""The events of nodes that leave in order, because they are told to."""

from __future__ import annotations

from dataclasses import dataclass

from dps.events.base import Event, recorded


@recorded
@dataclass(frozen=True, slots=True)
class NodeLeaving(Event):
    """A node was told to leave, and serves on until what it has is moved away.

    `why` is "signal" (SIGTERM) or "lifetime" (the time for which its process may run is nearly
    over).
    """

    node: str
    role: str
    why: str


@recorded
@dataclass(frozen=True, slots=True)
class NodeDrained(Event):
    """Whatever a leaving node held of shards, states and mail is on other nodes now.

    `seconds` is how long that took, since the node said that it leaves.
    """

    node: str
    seconds: float


@recorded
@dataclass(frozen=True, slots=True)
class NodeLeft(Event):
    """A node that was told to leave ends its process, and nothing is lost by that."""

    node: str
