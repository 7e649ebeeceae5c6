"""Leases: the right to serve, or to be waited for, which lasts only while it is renewed.

The holder counts four fifths of the lease from its request, on its own clock. The coordinator
counts the whole lease from when the request arrives. So the holder knows that its lease is over
before the coordinator gives it up, if the rates of their clocks differ by less than a tenth, and
the holder's clock stands still for at most a tenth of the lease. Clocks include the time in which a
process is stopped or a machine is suspended, but not that in which a virtual machine is paused.

The monitor of a host vouches for processes that run but do not answer. That only makes the
coordinator wait longer: it does not extend the lease for the holder.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from dps.errors import NotServing, TransportError
from dps.protocol.timings import Timings
from dps.protocol.transport import Clock

Holder = TypeVar("Holder", bound=Hashable)

DRIFT = 0.1  # share that a holder takes off, because clocks run at different rates
STANDSTILL = 0.1  # share for pauses of its virtual machine, in which its clock stands still


class Lease:
    """The holder's side. Used from one event loop."""

    def __init__(self, timings: Timings, clock: Clock) -> None:
        self._seconds = timings.lease
        self._clock = clock
        self._until = -math.inf

    @property
    def held(self) -> bool:
        """Whether the lease is valid."""
        return self._clock.monotonic() < self._until

    def end(self) -> None:
        """End the lease."""
        self._until = -math.inf

    async def renew(self, ask: Callable[[float], Awaitable[bool]]) -> None:
        """Renew the lease if `ask`, which is given a deadline, returns that it was granted."""
        # Calls may overlap, so that one lost answer does not end the lease.
        asked = self._clock.monotonic()
        try:
            granted = await ask(self._seconds)
        except (TransportError, NotServing):
            return  # the next renewal is on its way
        if granted:
            until = asked + self._seconds * (1 - DRIFT - STANDSTILL)
            self._until = max(self._until, until)


class Leases(Generic[Holder]):
    """The coordinator's side: holders, and when their leases end. Used from one event loop."""

    def __init__(self, timings: Timings, clock: Clock) -> None:
        self._seconds = timings.lease
        self._moment = timings.lease / 4
        self._patience = timings.patience
        self._clock = clock
        self._heard: dict[Holder, float] = {}
        self._since: dict[Holder, float] = {}
        self._until: dict[Holder, float] = {}

    def grant(self, holder: Holder) -> None:
        """Begin or renew the lease of a holder that asked for it."""
        now = self._clock.monotonic()
        if self.silence(holder) > self._seconds / 2:
            self._since[holder] = now
        self._heard[holder] = now
        self._until[holder] = now + self._seconds

    def vouch(self, holder: Holder) -> None:
        """Extend the lease of a holder that its monitor sees running, up to `Timings.patience`."""
        if holder in self._until:
            now = self._clock.monotonic()
            until = min(now + self._seconds, self._heard[holder] + self._patience)
            self._until[holder] = max(until, self._until[holder])

    def end(self, holder: Holder) -> None:
        """Forget a holder."""
        for times in (self._heard, self._since, self._until):
            times.pop(holder, None)

    def overdue(self, holder: Holder) -> float:
        """Seconds since the holder's lease ended; negative before that."""
        return self._clock.monotonic() - self._until.get(holder, -math.inf)

    def silence(self, holder: Holder) -> float:
        """Seconds since the holder last asked for its lease."""
        return self._clock.monotonic() - self._heard.get(holder, -math.inf)

    def answered_for(self, holder: Holder) -> float:
        """Seconds for which the holder has asked for its lease without a long gap."""
        now = self._clock.monotonic()
        return now - self._since[holder] if self.silence(holder) < self._seconds / 2 else 0.0

    def is_heard_after(self, holder: Holder, other: Holder) -> bool:
        """Whether a holder has renewed its lease since the lease of another one ended."""
        # If the other lease is still valid: whether the holder's lease is valid too. So two holders
        # that become silent at once cannot replace each other, whichever lease ends first.
        now = self._clock.monotonic()
        until, others = self._until.get(holder, -math.inf), self._until.get(other, -math.inf)
        return until > now if others > now else self._heard.get(holder, -math.inf) > others

    async def watch(self, on_over: Callable[[Holder], Awaitable[None]]) -> None:
        """Call `on_over` for every holder whose lease is over, repeatedly until `end` is called."""
        # If this process was stopped, it has not yet read the renewals that arrived during the
        # stop, so every holder gets at least half a lease more.
        while True:
            before = self._clock.monotonic()
            pause = self._until_next(before)
            await asyncio.sleep(pause)
            now = self._clock.monotonic()
            if now - before - pause > self._moment:
                grace = now + self._seconds / 2
                self._until = {holder: max(t, grace) for holder, t in self._until.items()}
            for holder in [holder for holder, t in self._until.items() if t <= now]:
                if self._until.get(holder, math.inf) <= now:  # it may be renewed during `on_over`
                    await on_over(holder)

    def _until_next(self, now: float) -> float:
        """Seconds until a lease may be over, but short enough to notice a standstill."""
        first = min(self._until.values(), default=math.inf) - now
        return min(max(first, self._seconds / 50), self._moment)
