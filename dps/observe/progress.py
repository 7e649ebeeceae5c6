"""Rates of a training, from successive observations, and its display in terminals and notebooks."""

from __future__ import annotations

import io
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from dps.observe.views import TrainingView

WINDOW_SECONDS = 10.0  # over which a rate is taken
_APART = 0.2  # least seconds between two observations that are kept

Show = Callable[[TrainingView], None]


class Pace:
    """Updates per second, from observations of their numbers."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, dict[str, int]]] = deque()

    def look(self, now: float, counts: Mapping[str, int]) -> None:
        """Observe the number of updates of each name at a time, in monotonic seconds."""
        if self._looks and now - self._looks[-1][0] < _APART:
            return
        self._looks.append((now, dict(counts)))
        while len(self._looks) > 2 and self._looks[1][0] <= now - WINDOW_SECONDS:
            self._looks.popleft()

    def of(
        self, name: str, now: float, count: int, began: float | None = None, before: int = 0
    ) -> float | None:
        """Return the rate over about the last ten seconds; None without an earlier observation.

        A known count `before`, at the time `began`, counts as the earliest one.
        """
        seen = [(t, counts[name]) for t, counts in self._looks if name in counts]
        since, first = seen[0] if seen and now - seen[0][0] >= _APART else (None, 0)
        if began is not None and (since is None or since < began):
            since, first = began, before
        return None if since is None else max(0.0, (count - first) / max(now - since, 1e-3))


@contextmanager
def display() -> Iterator[Show]:
    """Show training progress in the terminal or notebook; yields the function to call."""
    from rich.console import Console
    from rich.live import Live

    if notebook() is None:
        with Live(console=Console(), refresh_per_second=8, transient=False) as live:
            yield lambda view: live.update(progress(view), refresh=True)
        return
    # Plain HTML, because rich's own widgets are empty in a saved notebook.
    ipython = import_module("IPython.display")
    handle = ipython.display(ipython.HTML("<pre></pre>"), display_id=True)

    def show(view: TrainingView) -> None:
        console = Console(record=True, file=io.StringIO(), width=120, force_jupyter=False)
        console.print(progress(view))
        html = console.export_html(code_format="<pre>{code}</pre>", inline_styles=True)
        handle.update(ipython.HTML(html))

    yield show


def progress(view: TrainingView) -> Any:
    """Return a renderable of rich: a bar if the total is known, and lines below it."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    lines = Table.grid()
    if view.fraction is not None:
        colour = "red" if view.failed else "bar.complete"
        bar = ProgressBar(1.0, view.fraction, 60, complete_style=colour, finished_style=colour)
        lines.add_row(bar)
    for line in (view.line(), *view.notes):
        lines.add_row(Text(line))
    return lines


def notebook() -> Any:
    """Return IPython's shell if this program is the kernel of a notebook; else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if hasattr(shell, "kernel") else None
