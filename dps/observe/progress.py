"""How far a training is: its pace, and a line that shows it in a terminal or a notebook.

A notebook gets plain HTML, which is replaced as long as the training runs: no widgets, which not
every notebook can show, and which are empty in one that was saved.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib import import_module
from typing import Any

WINDOW_SECONDS = 10.0  # over which a rate is taken
_APART = 0.2  # seconds between two looks that are worth remembering


class Pace:
    """What comes to how many updates a second, from looks at how many there are."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, dict[str, int]]] = deque()

    def look(self, now: float, counts: Mapping[str, int]) -> None:
        """Note how many updates there are of each at a time, in seconds that never go back."""
        if self._looks and now - self._looks[-1][0] < _APART:
            return
        self._looks.append((now, dict(counts)))
        while len(self._looks) > 2 and self._looks[1][0] <= now - WINDOW_SECONDS:
            self._looks.popleft()

    def of(self, name: str, now: float, count: int, began: float, before: int = 0) -> float:
        """Updates a second of one that began at a time with so many.

        It is taken over the last ten seconds or so, or since the time when that was looked at.
        """
        seen = [(t, counts[name]) for t, counts in self._looks if name in counts]
        since, at_first = seen[0] if seen and now - seen[0][0] >= _APART else (began, before)
        if since < began:
            since, at_first = began, before
        return max(0.0, (count - at_first) / max(now - since, 1e-3))


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a training is.

    Attributes
    ----------
    done
        Gradients that the weights hold of the workers that are watched.
    total
        How many there will be; None: nobody has said so.
    rate
        Gradients a second of the workers that run.
    seconds
        How long it has gone on; None: that is not known, for it had ended before anybody looked.
    running, workers
        How many of the workers have not ended, and how many there are.
    numbers
        Name → number that says how good it is, such as the last loss.
    lost
        Acknowledged updates that were lost, on all shards.
    failed
        How many of the workers have failed.
    notes
        Sentences about what went wrong.
    """

    done: int
    total: int | None
    rate: float
    seconds: float | None
    running: int
    workers: int
    numbers: Mapping[str, float]
    lost: int = 0
    failed: int = 0
    notes: tuple[str, ...] = ()

    @property
    def left(self) -> float | None:
        """Seconds until the end at this rate; None: that cannot be told."""
        if self.total is None or not self.rate or not self.running:
            return None
        return max(0, self.total - self.done) / self.rate

    @property
    def fraction(self) -> float | None:
        """How much of it is done; None: nobody has said how much there is."""
        return None if self.total is None else min(1.0, self.done / max(1, self.total))

    def line(self) -> str:
        """Return it in words."""
        of_all = f"{self.done:,}" + ("" if self.total is None else f" of {self.total:,}")
        said = [f"{of_all} gradients", f"{self.rate:,.1f}/s"]
        if self.running:
            said += [f"{duration(self.left)} left"] if self.left is not None else []
            said += [f"{self.running} of {self.workers} workers running"]
        elif not self.workers:
            said += ["no worker was started"]
        else:
            after = "" if self.seconds is None else f" after {duration(self.seconds)}"
            said += [f"ended{after}"]
        said += [f"{self.failed} of {self.workers} workers failed"] if self.failed else []
        said += [f"{name} {number:.4g}" for name, number in self.numbers.items()]
        said += [f"{self.lost:,} updates lost"] if self.lost else []
        return " · ".join(said)

    def html(self) -> str:
        """Return it as HTML, with a bar where it is known how much there is."""
        fraction = self.fraction
        bar = ""
        if fraction is not None:
            bar = (
                '<div style="height:0.5em;max-width:32em;border-radius:0.25em;'
                'background:rgba(128,128,128,0.3)"><div style="height:100%;border-radius:0.25em;'
                f"background:{'#c44e52' if self.failed else '#4c78c8'};"
                f'width:{100 * fraction:.1f}%"></div></div>'
            )
        lines = "<br>".join(map(escape, (self.line(), *self.notes)))
        return f'<div style="line-height:1.6">{bar}<span>{lines}</span></div>'


Show = Callable[[Standing], None]


@contextmanager
def display() -> Iterator[Show]:
    """Show how far a training is, where this program is looked at; yields what is to be called."""
    if notebook() is not None:
        yield _NotebookLine()
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), refresh_per_second=8, transient=False) as live:
        yield lambda standing: live.update(_rendered(standing), refresh=True)


def _rendered(standing: Standing) -> Any:
    """A bar, if it is known how much there is, and below it what is said of it."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    lines = Table.grid()
    if standing.fraction is not None:
        colour = "red" if standing.failed else "bar.complete"
        bar = ProgressBar(1.0, standing.fraction, 60, complete_style=colour, finished_style=colour)
        lines.add_row(bar)
    for line in (standing.line(), *standing.notes):
        lines.add_row(Text(line))
    return lines


class _NotebookLine:
    """A piece of a notebook's output that is replaced by what is to be shown next."""

    def __init__(self) -> None:
        self._display = import_module("IPython.display")
        self._handle: Any = None

    def __call__(self, standing: Standing) -> None:
        shown = self._display.HTML(standing.html())
        if self._handle is None:
            self._handle = self._display.display(shown, display_id=True)
        else:
            self._handle.update(shown)


def notebook() -> Any:
    """IPython's shell, if this program is the kernel of a notebook; else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if hasattr(shell, "kernel") else None


def duration(seconds: float | None) -> str:
    """Return a time span as people say it."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return (
        f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
    )
