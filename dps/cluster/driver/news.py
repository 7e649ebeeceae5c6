"""Messages to the user of a parameter server: logged at once, and warnings in the user's thread.

Messages arise in the event loop of the Dask client. A Python warning that is issued there appears
below the notebook cell that made the client, and user code cannot catch it. So a warning waits for
the next call of the parameter server, or for the end of the running cell.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Scheduler

from dps.cluster.node.logs import is_logged
from dps.cluster.platform import SYSTEM, platform_of
from dps.errors import LastStateNotSavedWarning
from dps.observe.progress import notebook

if TYPE_CHECKING:
    import distributed

# Below a logger that Dask shows by default.
_log = logging.getLogger("distributed.client.dps")
_DPS = str(Path(__file__).parents[2])


class News:
    """The messages of one parameter server to its user. Thread-safe.

    Attributes
    ----------
    scheduler_logs
        Whether this process also shows the log of Dask's scheduler.
    unsaved
        The warning to issue if the parameter server is never closed; "": nothing would be lost.
    """

    def __init__(self, client: distributed.Client) -> None:
        address = client.scheduler.address
        here = any(each.address == address for each in list(Scheduler._instances))
        self.scheduler_logs = here or platform_of(client) is not SYSTEM  # all is here then
        self.unsaved = ""
        self._waiting: deque[tuple[str, type[Warning]]] = deque()
        self._failures: Counter[str] = Counter()
        self._cells = getattr(notebook(), "events", None)
        if self._cells is not None:
            self._cells.register("post_run_cell", self.deliver)

    def log(self, text: str) -> None:
        """Log a line."""
        _log.warning("dps: %s", text)

    def warn(self, text: str, category: type[Warning], *, logged: bool = False) -> None:
        """Queue a warning, and log it now unless it is `logged`: it may be issued much later."""
        if not logged:
            self.log(text)
        self._waiting.append((f"dps: {text}", category))

    def failed(self, what: str, error: BaseException) -> None:
        """Warn of the first failure of this kind, log its traceback, and count the others."""
        kind = f"{what}: {type(error).__name__}"
        self._failures[kind] += 1
        times = self._failures[kind]
        if times == 1:
            _log.warning("dps: %s", what, exc_info=error)
            self.warn(f"{kind}: {error}", RuntimeWarning, logged=True)
        elif is_logged(times):
            self.log(f"{kind}, {times} times so far")

    def deliver(self, *_: Any) -> None:
        """Issue the queued warnings; called in the user's thread."""
        while True:
            try:
                text, category = self._waiting.popleft()
            except IndexError:  # another thread may have issued the last one
                return
            warnings.warn(text, category, stacklevel=_level_of_user())

    def close(self) -> None:
        """Issue the last warnings; `weakref.finalize` calls this if the user has not."""
        if self.unsaved:
            self.warn(self.unsaved, LastStateNotSavedWarning, logged=True)
            self.unsaved = ""
        if self._cells is not None:
            self._cells.unregister("post_run_cell", self.deliver)
            self._cells = None
        self.deliver()


def _level_of_user() -> int:
    """Return the stack level, from the caller's, of the first function outside dps."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_DPS):
        frame, level = frame.f_back, level + 1
    return level
