"""How a node leaves: it reports that it has to leave, and ends once it is empty.

It has to leave after a SIGTERM, or when its lifetime (`dask worker --lifetime`) is nearly over.
Dask alone would end the process, with the shards in it, at once or at the end of that time. So the
node reports earlier to the groups that use it, and serves until they have moved everything away
(`dps.cluster.driver.shard_hosts`). A second SIGTERM, and the end of the lifetime, end it as they
would without dps.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import Counter
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
from distributed import Client

from dps.cluster.names import topic
from dps.cluster.platform import made_once, platform_of

if TYPE_CHECKING:
    import distributed

NAME = "dps-leave"
LOOK_SECONDS = 0.1
LOOKS = 3  # in a row that must find it empty: a task may be under way to it
LEAST_MARGIN, MOST_MARGIN = 60.0, 600.0


def margin(lifetime: float) -> float:
    """Return how many seconds before the end of its lifetime a node begins to leave.

    A tenth of it, but at least a minute, in which a job may start, and at most ten minutes; never
    more than half.
    """
    return min(max(LEAST_MARGIN, lifetime / 10), MOST_MARGIN, lifetime / 2)


class Leave:
    """Whether one node has to leave. Used from the event loop of its process.

    Attributes
    ----------
    why
        Why the node has to leave, "signal" or "lifetime"; None: it stays. May be read in any
        thread.
    """

    def __init__(self, dask_worker: distributed.Worker) -> None:
        self.why: str | None = None
        self._worker = dask_worker
        self._loop = asyncio.get_running_loop()
        self._users: Counter[str] = Counter()
        self._handlers: dict[int, Any] = {}  # of signals, before ours
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    def enter(self, group: str) -> None:
        """Add a user of a group, which is informed if the node has to leave."""
        if not self._users:
            self._listen()
        self._users[group] += 1
        if self.why is not None:
            self._report(group, self.why)

    def exit(self, group: str) -> None:
        """Remove a user of a group."""
        self._users[group] -= 1
        self._users += Counter()  # without those that are at 0
        if not self._users and self.why is None:
            self._stop_listening()

    def _listen(self) -> None:
        lifetime = self._worker.lifetime
        if lifetime:
            ends = psutil.Process().create_time() + lifetime
            until = max(0.0, ends - margin(lifetime) - time.time())
            self._timer = self._loop.call_later(until, self._leave, "lifetime")
        # A user's own program, which may have Dask workers in its process, keeps its signals.
        if not platform_of(self._worker).handles_signals:
            return
        if threading.current_thread() is threading.main_thread() and not Client._instances:
            self._handlers[signal.SIGTERM] = _installed(signal.SIGTERM, self._signalled)
            if self._worker.nanny:
                # Ctrl-C reaches every process of a terminal, and of a notebook. The driver decides
                # what follows: the interrupted cell may only show the progress.
                self._handlers[signal.SIGINT] = _installed(signal.SIGINT, signal.SIG_IGN)

    def _stop_listening(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, before in list(self._handlers.items()):
            signal.signal(number, before)
        self._handlers.clear()

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        # Runs between any two instructions of the main thread: it must not log, nor send.
        signal.signal(number, self._handlers.pop(number, signal.SIG_DFL))
        self._loop.call_soon_threadsafe(self._leave, "signal")

    def _leave(self, why: str) -> None:
        if self.why is None:
            self.why = why
            for group in self._users:
                self._report(group, why)
            self._ending = self._loop.create_task(self._end_when_empty(tuple(self._users)))

    def _report(self, group: str, what: str) -> None:
        message = {"address": self._worker.address, "what": what}
        self._worker.log_event(topic("leaving", group), message)

    async def _end_when_empty(self, groups: tuple[str, ...]) -> None:
        found = 0
        while found < LOOKS:
            await asyncio.sleep(LOOK_SECONDS)
            found = found + 1 if self._is_empty else 0
        for group in groups:
            self._report(group, "left")
        # Results of tasks that have ended here go to other nodes before.
        await self._worker.close_gracefully(reason="dps-told-to-leave")

    @property
    def _is_empty(self) -> bool:
        state = self._worker.state
        return not (self._users or state.actors or state.executing or state.long_running)


def leave_of(dask_worker: distributed.Worker) -> Leave:
    """Return the `Leave` of a node's process; the first call must be on its event loop."""
    return made_once(dask_worker, NAME, lambda: Leave(dask_worker))


def _installed(number: int, handler: Any) -> Any:
    """Handle a signal; return what did before, the default where that was not set from Python."""
    before = signal.signal(number, handler)
    return signal.SIG_DFL if before is None else before
