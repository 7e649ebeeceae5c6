"""How a node leaves, on the node's side: it is told to, says so, and ends once it is empty.

It is told by SIGTERM, or because its lifetime (`dask worker --lifetime`) is nearly over. Dask alone
would end the process, with the shards in it, at once or at the end of that time. So the node takes
notice earlier, tells the groups that use it, and serves on until they have moved everything away. A
second SIGTERM, and the end of the lifetime, end it as they would have without dps.
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

from dps.cluster.platform import made_once, platform_of

if TYPE_CHECKING:
    import distributed

NAME = "dps-leave"
LOOK_SECONDS = 0.1
LOOKS = 3  # so often it must be found empty: a task may be under way to it
LEAST_MARGIN, MOST_MARGIN = 60.0, 600.0


def leaving_topic(group: str) -> str:
    """The Dask topic on which nodes of a group say that they are told to leave, or do."""
    return f"dps-leaving-{group}"


def margin(lifetime: float) -> float:
    """How many seconds before the end of its lifetime a node takes notice of it.

    A tenth of it, but no less than a minute, within which a job may start, nor more than ten; and
    never more than half.
    """
    return min(max(LEAST_MARGIN, lifetime / 10), MOST_MARGIN, lifetime / 2)


class Leave:
    """Whether one node is to leave. Used from the event loop of its process.

    Attributes
    ----------
    why
        What told the node to leave, "signal" or "lifetime"; None: nothing has. May be read from
        any thread.
    """

    def __init__(self, dask_worker: distributed.Worker) -> None:
        self.why: str | None = None
        self._worker = dask_worker
        self._loop = asyncio.get_running_loop()
        self._users: Counter[str] = Counter()
        self._before: Any = None
        self._before_interrupt: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    def enter(self, group: str) -> None:
        """Have something of a group on this node: the group is told if the node is to leave."""
        if not self._users:
            self._listen()
        self._users[group] += 1
        if self.why is not None:
            self._say(group, self.why)

    def exit(self, group: str) -> None:
        """Have one thing less of a group on this node."""
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
            self._before = signal.signal(signal.SIGTERM, self._signalled)
            if self._worker.nanny:
                # Ctrl-C reaches every process of a terminal, and of a notebook. What is to follow
                # is the driver's to say: a cell may be interrupted that only shows the progress.
                self._before_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _stop_listening(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
        if self._before_interrupt is not None:
            signal.signal(signal.SIGINT, self._before_interrupt)
            self._before_interrupt = None

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        # Runs between any two instructions of the main thread: it must not log, nor send.
        signal.signal(number, self._before)
        self._before = None
        self._loop.call_soon_threadsafe(self._leave, "signal")

    def _leave(self, why: str) -> None:
        if self.why is None:
            self.why = why
            for group in self._users:
                self._say(group, why)
            self._ending = self._loop.create_task(self._end_when_empty(tuple(self._users)))

    def _say(self, group: str, what: str) -> None:
        message = {"address": self._worker.address, "what": what}
        self._worker.log_event(leaving_topic(group), message)

    async def _end_when_empty(self, groups: tuple[str, ...]) -> None:
        found = 0
        while found < LOOKS:
            await asyncio.sleep(LOOK_SECONDS)
            found = found + 1 if self._is_empty else 0
        for group in groups:
            self._say(group, "left")
        # Results of tasks that have ended here go to other nodes before.
        await self._worker.close_gracefully(reason="dps-told-to-leave")

    @property
    def _is_empty(self) -> bool:
        state = self._worker.state
        return not (self._users or state.actors or state.executing or state.long_running)


def leave_of(dask_worker: distributed.Worker) -> Leave:
    """The `Leave` of a node's process; first asked for on its event loop."""
    return made_once(dask_worker, NAME, lambda: Leave(dask_worker))
