"""The nodes that are started in place of those that leave, or are lost without any fault.

Who is told to leave is replaced at once, so that what is on it has somewhere to go. Who is lost,
such as a job that somebody else has ended, is replaced so that the training goes on; unless a fault
has struck it, for then the fault plan says what becomes of its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from dps.cluster.backends.base import Cluster
from dps.cluster.platform import Running, platform_of
from dps.core.names import NODE_ROLES, replacement, role_of
from dps.errors import DpsError
from dps.events import Event, Killed, NodeLeaving

LOOK_SECONDS = 0.25
# A fault is recorded once it is proven, and until then its victim was struck by nobody.
PROOF_SECONDS = 3.0


class Replacing:
    """Has a cluster replace nodes while it is entered, in a thread of its own.

    Parameters
    ----------
    cluster
        Whose nodes are replaced.
    tell
        Is told of what cannot be replaced.
    """

    def __init__(self, cluster: Cluster, tell: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._tell = tell
        self._platform = platform_of(cluster.client)
        self._told: deque[str] = deque()
        self._news = self._platform.flag()
        self._struck: set[str] = set()
        self._replaced: set[str] = set()
        self._missed: dict[str, float] = {}
        self._over = self._platform.flag()
        self._running: Running

    def __enter__(self) -> Replacing:
        self._running = self._platform.start(self._look, "dps-replacing")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._news.set()
        self._running.join()

    def note(self, event: Event) -> None:
        """Take note of an event: a node is to leave, or was struck. Called in any thread."""
        if isinstance(event, NodeLeaving):
            self._told.append(event.node)
            self._news.set()
        elif isinstance(event, Killed):
            self._struck.add(event.node)

    def _look(self) -> None:
        while not self._over.is_set():
            self._news.wait(LOOK_SECONDS)
            self._news = self._platform.flag()
            while self._told:
                self._replace(self._told.popleft())
            for name in self._lost():
                self._replace(name)

    def _lost(self) -> list[str]:
        """The nodes that were lost long enough ago to know that no fault has struck them."""
        now = self._platform.clock.monotonic()
        known = [name for name in self._cluster.pids if role_of(name) in NODE_ROLES]
        there = [name for name in known if name not in self._replaced | self._struck]
        for name in there:
            if self._cluster.gone(name, 0.0):
                self._missed.setdefault(name, now)
        return [n for n in there if now - self._missed.get(n, now) > PROOF_SECONDS]

    def _replace(self, node: str) -> None:
        if node in self._replaced:
            return
        self._replaced.add(node)
        name = replacement(node)
        if name in self._cluster.pids:
            return  # a fault plan has brought it back meanwhile
        try:
            self._cluster.start(replace(self._cluster.spec(node), name=name))
        except DpsError as error:
            self._tell(f"warning: nothing takes the place of {node}: {error}")
