"""Durations of the protocol: deadlines, leases, and how long busy processes are waited for."""

from __future__ import annotations

from dataclasses import dataclass

from dps.core.ranges import Checked, Positive
from dps.errors import require

RENEWAL = 0.5  # at most, in seconds: replies also carry news for hosts and workers, like `leaving`


@dataclass(frozen=True, slots=True)
class Timings(Checked):
    """Durations of the protocol, all in seconds.

    Attributes
    ----------
    call, copy
        Deadline of one call, and of one that carries a whole shard.
    hold
        How long a head holds a request that the consistency model makes wait, before it makes the
        client ask again; less than `call`.
    retry
        Pause before a failed attempt is repeated.
    unavailable
        How long a client waits for a shard that is down before it gives up.
    flush
        How often recorded events are sent.
    lease
        How long an unreachable process is treated as alive: one that does not answer, and that the
        monitor of its host does not see.
    patience
        How long a busy process is waited for: one that its monitor sees running, but that does not
        answer. A server that holds the only copy of a state is waited for as long as it lives.
    stopped
        How long a process must be stopped until its monitor may kill it. A process that hangs in
        the kernel counts as stopped after 4 s.
    last_copy
        How long an unreachable server is waited for if it holds the only copy of a state.

    Raises
    ------
    ConfigurationError
        A duration is not a number above 0, or `hold` is not less than `call`.

    Examples
    --------
    >>> Timings(lease=30).lease
    30.0
    """

    call: Positive = 5.0
    copy: Positive = 60.0
    hold: Positive = 2.0
    retry: Positive = 0.05
    unavailable: Positive = 120.0
    flush: Positive = 0.25
    lease: Positive = 10.0
    patience: Positive = 60.0
    stopped: Positive = 0.8
    last_copy: Positive = 60.0

    @property
    def renewal(self) -> float:
        """How often leases are renewed, so that a lost message does not end one."""
        return min(self.lease / 4, RENEWAL)

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        require(
            self.hold < self.call,
            f"Timings: hold={self.hold:g}, expected less than call={self.call:g}: a held "
            "request must end before the deadline of its call",
        )
