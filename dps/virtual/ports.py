"""The ports of hosts: what is sent at the same time shares them evenly."""

from __future__ import annotations

import math
from asyncio import AbstractEventLoop, TimerHandle
from collections import defaultdict
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass

SMALL_BYTES = 1 << 14  # a message of fewer passes between others, as packets do


@dataclass(slots=True, eq=False)
class _Transfer:
    """Bytes that are on their way from one host to another."""

    source: str
    target: str
    left: float
    delay: float
    done: Callable[[], None]
    rate: float
    since: float
    timer: TimerHandle | None = None


class Ports:
    """One port for each host, out and in. Used from one loop.

    Parameters
    ----------
    bandwidth
        Bytes a second of each, each way.
    context
        What is under way belongs to it.
    """

    def __init__(self, loop: AbstractEventLoop, bandwidth: float, context: Context) -> None:
        self._loop = loop
        self._bandwidth = bandwidth
        self._context = context
        self._out: dict[str, dict[_Transfer, None]] = defaultdict(dict)
        self._in: dict[str, dict[_Transfer, None]] = defaultdict(dict)

    def send(
        self, source: str, target: str, nbytes: int, delay: float, done: Callable[[], None]
    ) -> None:
        """Send bytes from one host to another; call `done` when the last has arrived.

        That is `delay` seconds after it has passed both ports.
        """
        if nbytes < SMALL_BYTES or math.isinf(self._bandwidth):
            self._later(nbytes / self._bandwidth + delay, done)
            return
        now = self._loop.time()
        transfer = _Transfer(source, target, nbytes, delay, done, 0.0, now)
        self._out[source][transfer] = self._in[target][transfer] = None
        self._share(source, target)

    def _share(self, source: str, target: str) -> None:
        """Give each transfer that is concerned its share from now on."""
        now = self._loop.time()
        for transfer in {**self._out[source], **self._in[target]}:
            transfer.left -= transfer.rate * (now - transfer.since)
            crowd = max(len(self._out[transfer.source]), len(self._in[transfer.target]))
            transfer.rate, transfer.since = self._bandwidth / crowd, now
            if transfer.timer is not None:
                transfer.timer.cancel()
            left = max(0.0, transfer.left) / transfer.rate
            transfer.timer = self._later(left, self._arrived, transfer)

    def _arrived(self, transfer: _Transfer) -> None:
        del self._out[transfer.source][transfer], self._in[transfer.target][transfer]
        transfer.timer = None  # it leads back here: the bytes would stay until the next collection
        self._share(transfer.source, transfer.target)
        self._later(transfer.delay, transfer.done)

    def _later(self, seconds: float, call: Callable[..., None], *args: object) -> TimerHandle:
        return self._loop.call_later(seconds, call, *args, context=self._context)
