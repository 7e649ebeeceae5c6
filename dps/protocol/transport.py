"""The interfaces that the protocol runs against: `Transport`, `Clock` and `Monitors`.

`dps.cluster` implements them on Dask, `dps.virtual` on virtual time in one process.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

# By what processes of a group call each other: the best that works, or one that was chosen, where
# it works; "dask" always does.
TransportChoice = Literal["auto", "shared_memory", "stream", "dask"]
TRANSPORTS: tuple[TransportChoice, ...] = get_args(TransportChoice)


class Endpoint(NamedTuple):
    """Where a party can be called: the address of its process and its key in that process."""

    address: str
    key: str


class Transport(Protocol):
    """Carries a message to an endpoint and brings the reply back."""

    async def call(self, to: Endpoint, message: Any, deadline: float, link: str = "control") -> Any:
        """Send `message` and return the reply.

        Parameters
        ----------
        deadline
            Seconds after which the call is given up.
        link
            What the bytes are counted as: "train", "replicate", "store" or "control".

        Raises
        ------
        Unreachable
            The connection was refused or lost. The message may have been carried out.
        DeadlineExceeded
            No reply within the deadline. The message may have been carried out.
        DpsError
            Whatever error the other side raised.
        """
        ...

    async def gone(self, address: str) -> bool:
        """Whether it is proven that the process at `address` has ended: nobody listens there.

        False says nothing: the process may be cut off, paused, or alive. Takes a moment at most.
        """
        ...

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return an array that can be sent without a copy, if there is such memory; not filled.

        Thread-safe. It is written to until it is sent, and never again: whoever has more to send
        takes another one.
        """
        ...


class Clock(Protocol):
    """Tells the time. Waiting is asyncio's; a simulation runs on a loop of its own."""

    def now(self) -> float:
        """Seconds since the Unix epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock of this process that never goes back, for durations and leases."""
        ...


class Watched(NamedTuple):
    """A process as the monitor of its host knows it: where the monitor is asked, and the number."""

    monitor: str
    number: int


class Monitors(Protocol):
    """The monitors of the hosts that a group runs on, as the coordinator reaches them.

    What they see comes to the coordinator as `dps.protocol.messages.Sighted`.
    """

    def follow(self, monitor: str) -> None:
        """Pass reports of a monitor to the coordinator, from now on; no effect if repeated."""
        ...

    async def kill(self, watched: Watched, stopped: float) -> None:
        """Have a process killed that has been stopped for `stopped` seconds, and still is.

        Raises
        ------
        DpsError
            The monitor cannot be reached. A process that it does not kill is no error.
        """
        ...
