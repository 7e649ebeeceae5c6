"""Notices that the scheduler of a supervised parameter server is lost, also while that comes up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dps.cluster.driver.connection import SchedulerConnection

if TYPE_CHECKING:
    import distributed

    from dps.cluster.driver.parameter_server import ParameterServer

LOOK_SECONDS = 0.05
MOMENT_SECONDS = 0.5


class SchedulerWatch:
    """Watches the connection of a client to its scheduler, in a thread of its own.

    It begins before there is a parameter server, for that may wait for a scheduler that is lost.

    Parameters
    ----------
    told
        Called with what has happened, in that thread, when the scheduler is lost.
    """

    def __init__(self, client: distributed.Client, told: Callable[[str], None]) -> None:
        self._connection = SchedulerConnection(client)
        self._address = client.scheduler.address
        self._told = told
        self._server: ParameterServer | None = None
        self._over = False
        self._found = ""
        threading.Thread(target=self._look, daemon=True, name="dps-scheduler-watch").start()

    @property
    def lost(self) -> str:
        """What has happened, if the scheduler was lost before the parameter server was closed."""
        if not self._found:
            server = self._server
            if self._connection.lost if server is None else server.scheduler_lost:
                self._found = f"the connection to Dask's scheduler at {self._address} broke"
        return self._found

    def is_up(self, server: ParameterServer) -> None:
        """Take note of the parameter server, with which it ends."""
        self._server = server

    def end(self) -> None:
        """Look no more, as nothing came up: perhaps because of a loss that shows in a moment."""
        until = time.monotonic() + MOMENT_SECONDS
        while not self.lost and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        self._over = True

    def _look(self) -> None:
        while not self._over and (self._server is None or not self._server.closed):
            if lost := self.lost:
                self._told(lost)
                return
            time.sleep(LOOK_SECONDS)
