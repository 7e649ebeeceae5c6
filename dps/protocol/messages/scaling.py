"""Messages by which the driver scales a group: how many servers, which to drain, who leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dps.protocol.transport import Endpoint
from dps.protocol.wire import message

if TYPE_CHECKING:
    pass


@message
@dataclass(frozen=True, slots=True)
class Scale:
    """To the coordinator: keep the shards on this many hosts from now on. Reply: Done, at once."""

    servers: int


@message
@dataclass(frozen=True, slots=True)
class Drain:
    """To the coordinator: empty a host, and make no more use of it. Reply: Done, at once."""

    host: Endpoint


@message
@dataclass(frozen=True, slots=True)
class Dismiss:
    """To the coordinator: have a worker asked to leave. Reply: Done, at once."""

    worker: str
