"""What the user of a parameter server is to know: logged at once, and a warning in their thread.

News come up in the event loop of the Dask client. A Python warning that is issued there is shown
under whatever cell of a notebook made the client, and nothing of the user's can catch it. So it
waits for the next call of the parameter server, or the end of the cell that runs.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Scheduler

from dps.cluster.node.quiet import is_told
from dps.cluster.platform import SYSTEM, platform_of
from dps.errors import LastStateNotSavedWarning
from dps.observe.progress import notebook

if TYPE_CHECKING:
    import distributed

# Below a logger that Dask shows by default.
_log = logging.getLogger("distributed.client.dps")
_DPS = str(Path(__file__).parents[2])


class News:
    """The news of one parameter server. Thread-safe.

    Attributes
    ----------
    scheduler_logs
        Whether what Dask's scheduler logs is logged in this process.
    unsaved
        What is lost if the parameter server is not closed; "": nothing.
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
        """Have something be a warning, and log it unless it is: the warning may take a while."""
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
        elif is_told(times):
            self.log(f"{kind}, {times} times until now")

    def deliver(self, *_: Any) -> None:
        """Issue the warnings that wait; called in the user's thread."""
        while True:
            try:
                text, category = self._waiting.popleft()
            except IndexError:  # another thread may have issued the last one
                return
            warnings.warn(text, category, stacklevel=_level_of_user())

    def close(self) -> None:
        """Issue the last warnings; `weakref.finalize` calls this where nobody else has."""
        if self.unsaved:
            self.warn(self.unsaved, LastStateNotSavedWarning, logged=True)
            self.unsaved = ""
        if self._cells is not None:
            self._cells.unregister("post_run_cell", self.deliver)
            self._cells = None
        self.deliver()


def _level_of_user() -> int:
    """The stack level, from the caller's, of the first function that is not of dps."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_DPS):
        frame, level = frame.f_back, level + 1
    return level
