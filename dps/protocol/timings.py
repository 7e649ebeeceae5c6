"""How long the parts of the protocol wait for each other."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dps.core.ranges import positive
from dps.errors import require


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

    Raises
    ------
    ConfigurationError
        One is no number above 0, or `patience` is not less than `call`.
    """

    call: float = 5.0
    copy: float = 60.0
    patience: float = 2.0
    retry: float = 0.05
    unavailable: float = 120.0
    flush: float = 0.25
    lease: float = 1.0
    last_copy: float = 30.0

    def __post_init__(self) -> None:
        positive(self, *(field.name for field in fields(self)))
        require(
            self.patience < self.call,
            f"Timings: patience={self.patience:g}, expected less than call={self.call:g}: whoever "
            "is held for longer than a call may take is taken for lost",
        )
