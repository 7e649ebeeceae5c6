"""The state of a training, as live views show it: text and HTML, in terminals and notebooks.

A parameter server collects it from its shards, `dps top` from a Dask scheduler or a growing record,
and `dps run` from the events of its trials.
"""

from __future__ import annotations

import io
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from rich.filesize import decimal

from dps import events
from dps.core.names import restored_from

if TYPE_CHECKING:
    import pandas

T = TypeVar("T")

WINDOW_SECONDS = 10.0  # over which a rate is taken
_APART = 0.2  # least seconds between two observations that are kept
_NAMED = 3  # shards without copies that are named one by one
_MAX_ROWS = 40  # in an HTML table
_CELL = '<td style="text-align:left">'


@dataclass(frozen=True, slots=True)
class ShardView:
    """The state of one shard.

    Attributes
    ----------
    node
        The node that clients push to; "" if the shard is down.
    replicas
        The nodes that hold the shard, `node` first.
    version
        Number of applied updates; None if unknown.
    epoch
        Grows with every failure and every move.
    nbytes
        Size of weights, optimizer state and rows of tables, on one replica.
    address
        Dask's address of `node`, such as "tcp://127.0.0.1:40123"; "" if the shard is down.
        `client.run(os.getpid, workers=[address])` returns the id of its process.
    wanted
        Number of replicas asked for; with fewer, the shard survives fewer losses. 0 if unknown.
    rate
        Updates per second, over at most the last ten seconds; None if unknown.
    staleness
        Mean staleness of the shard's updates, in versions; None if unknown.
    """

    shard: int
    node: str
    replicas: tuple[str, ...]
    version: int | None
    epoch: int
    nbytes: int = 0
    address: str = ""
    wanted: int = 0
    rate: float | None = None
    staleness: float | None = None

    @property
    def serving(self) -> bool:
        """Whether a node serves it."""
        return bool(self.replicas)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The state of one worker.

    Attributes
    ----------
    status
        "waiting" (for a thread, or admission), "running", "finished", "failed", "stopped",
        "cancelled", or the reason why it left ("lost").
    updates
        Number of its applied gradients, on the shard that has most of them, with those of earlier
        incarnations and before `ParameterServer.resume`.
    clock
        Its clock for the consistency model, while it is active; otherwise None.
    rate
        Applied gradients per second, over at most the last ten seconds; None if it is not running.
    reported
        The last number that it reported under each name.
    node
        Its node; "" if unknown.
    """

    worker: str
    status: str
    updates: int
    clock: int | None
    rate: float | None
    reported: Mapping[str, float] = field(default_factory=dict)
    node: str = ""

    @property
    def ended(self) -> bool:
        """Whether its function has ended."""
        return self.status not in ("waiting", "running")

    @property
    def loss(self) -> float | None:
        """The last loss that it reported, if any."""
        return self.reported.get("loss")


class Listing(tuple[T, ...]):
    """Views, one for each shard or worker: a tuple that is shown as a table.

    `pandas.DataFrame(list(listing))` makes a data frame of it.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self._frame().to_string(index=False)) if self else "()"

    def _repr_html_(self) -> str:
        if not self:
            return "<i>none</i>"
        return str(self._frame().to_html(index=False, border=0, max_rows=_MAX_ROWS))

    def _frame(self) -> pandas.DataFrame:
        import pandas as pd  # deferred: takes a second

        columns, rows = self.table()
        return pd.DataFrame(rows, columns=list(columns))

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return headings, and a row for each view; empty columns are omitted."""
        views: Sequence[Any] = self
        columns: Mapping[str, Callable[[Any], str]]
        columns = _SHARDS if views and isinstance(views[0], ShardView) else _WORKERS
        cells = {name: [cell(view) for view in views] for name, cell in columns.items()}
        kept = {name: column for name, column in cells.items() if set(column) - {"–"}}
        return tuple(kept), list(zip(*kept.values(), strict=True))


def size(nbytes: int) -> str:
    """Return a number of bytes with its unit, in powers of 1000."""
    # Round first, because rich chooses the unit before it rounds.
    return decimal(int(float(f"{nbytes:.4g}")))


def _or_dash(value: float | None, form: str = ",") -> str:
    return "–" if value is None else format(value, form)


_SHARDS: dict[str, Callable[[ShardView], str]] = {
    "shard": lambda s: str(s.shard),
    "node": lambda s: s.node or ("down" if s.epoch > 1 else "starting"),
    "version": lambda s: _or_dash(s.version),
    "epoch": lambda s: str(s.epoch),
    "updates/s": lambda s: _or_dash(s.rate, ".1f"),
    "staleness": lambda s: _or_dash(s.staleness, ".1f"),
    "copies": lambda s: f"{len(s.replicas)} of {s.wanted}" if s.wanted else "–",
    "other replicas": lambda s: ", ".join(s.replicas[1:]) or "–",
    "size": lambda s: size(s.nbytes) if s.nbytes else "–",
    "address": lambda s: s.address or "–",
}
_WORKERS: dict[str, Callable[[WorkerView], str]] = {
    "worker": lambda w: w.worker,
    "node": lambda w: w.node or "–",
    "status": lambda w: w.status,
    "gradients": lambda w: f"{w.updates:,}",
    "clock": lambda w: _or_dash(w.clock),
    "gradients/s": lambda w: _or_dash(w.rate, ".1f"),
    "loss": lambda w: _or_dash(w.loss, ".4g"),
}


@dataclass(frozen=True, slots=True)
class TrainingView:
    """The state of a training."""

    name: str
    state: str  # "running", "closed" for a parameter server, or the status of an ended trial
    t: float  # seconds since the Unix epoch
    done: int | None  # gradients that every shard has applied; None if unknown
    total: int | None = None  # their expected number at the end
    shards: Listing[ShardView] = field(default_factory=Listing)
    workers: Listing[WorkerView] = field(default_factory=Listing)
    lost: int = 0  # acknowledged updates, on all shards
    scores: Mapping[str, float] = field(default_factory=dict)  # of the last evaluation
    seconds: float | None = None  # the duration
    notes: tuple[str, ...] = ()  # important messages, such as the error of a worker
    recent: tuple[tuple[float, str], ...] = ()  # times of faults, losses and recoveries, in words

    @property
    def running(self) -> int:
        """Number of workers that have not ended."""
        return sum(not worker.ended for worker in self.workers)

    @property
    def failed(self) -> int:
        """Number of workers that failed."""
        return sum(worker.status == "failed" for worker in self.workers)

    @property
    def rate(self) -> float:
        """Gradients per second of running workers."""
        return sum(worker.rate or 0.0 for worker in self.workers)

    @property
    def left(self) -> float | None:
        """Seconds until the end at this rate; None if unknown."""
        if self.total is None or not self.rate or not self.running:
            return None
        return max(0, self.total - (self.done or 0)) / self.rate

    @property
    def fraction(self) -> float | None:
        """The share that is done; None if the total is unknown."""
        return None if self.total is None else min(1.0, (self.done or 0) / max(1, self.total))

    def line(self) -> str:
        """Return the progress in one line."""
        of_all = "" if self.total is None else f" of {self.total:,}"
        parts = [f"{_or_dash(self.done)}{of_all} gradients", f"{self.rate:,.1f}/s"]
        if self.running:
            parts += [f"{_clock(self.left)} left"] if self.left is not None else []
            parts += [f"{self.running} of {len(self.workers)} workers running"]
        elif not self.workers:
            parts += ["no workers started"]
        else:
            parts += ["ended" if self.seconds is None else f"ended after {_clock(self.seconds)}"]
        failed = [f"{self.failed} of {len(self.workers)} workers failed"] if self.failed else []
        return " · ".join([*parts, *failed, *self.remarks()])

    def remarks(self) -> list[str]:
        """Return the loss, the scores, the shards that are down, and the lost updates."""
        losses = [worker.loss for worker in self.workers if worker.loss is not None]
        parts = [f"loss {sum(losses) / len(losses):.4g}"] if losses else []
        parts += [f"evaluated {name} {number:.4g}" for name, number in self.scores.items()]
        parts += [f"shard {s.shard} is down" for s in self.shards if s.epoch > 1 and not s.node]
        return [*parts, f"{self.lost:,} updates lost"] if self.lost else parts


def overview_line(view: TrainingView, facts: Mapping[str, str]) -> str:
    """Return a one-line description of a parameter server: its state, facts and notes."""
    state = "" if view.state == "running" else f" ({view.state})"
    parts = [f"{name}={text}" for name, text in facts.items()]
    if view.workers:
        running = sum(worker.status == "running" for worker in view.workers)
        parts.append(f"workers={len(view.workers)} ({running} running)")
    notes = "".join(f"; {note}" for note in view.notes)
    return f"<ParameterServer {view.name}{state}: {', '.join(parts)}{notes}>"


def overview_html(view: TrainingView, facts: Mapping[str, str]) -> str:
    """Return a description of a parameter server as a block of HTML for notebooks."""
    rows = (
        f"<tr>{_CELL}{escape(name)}</td>{_CELL}<code>{escape(value)}</code></td></tr>"
        for name, value in facts.items()
    )
    parts = [
        f"<b>{escape(f'ParameterServer {view.name}')}</b>",
        escape(view.state),
        *(f"<b>⚠ {escape(note)}</b>" for note in view.notes),
        f"<table>{''.join(rows)}</table>",
        *(each._repr_html_() for each in (view.shards, view.workers) if each),
    ]
    return "".join(f"<div>{part}</div>" for part in parts)


def missing_copies(shards: Sequence[ShardView]) -> list[str]:
    """Return sentences about shards that are down, or have fewer copies than were asked for."""
    lacking = [shard for shard in shards if len(shard.replicas) < shard.wanted]
    if len(lacking) > _NAMED:
        return [f"{len(lacking)} shards lack copies: see ps.shards"]
    return [
        f"shard {shard.shard} "
        + (f"has {len(shard.replicas)} of {shard.wanted} copies" if shard.serving else "is down")
        for shard in lacking
    ]


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


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

        If `began` is given, the count `before` at that time replaces all earlier observations.
        """
        seen = [(t, counts[name]) for t, counts in self._looks if name in counts]
        since, first = seen[0] if seen and now - seen[0][0] >= _APART else (None, 0)
        if began is not None and (since is None or since < began):
            since, first = began, before
        return None if since is None else max(0.0, (count - first) / max(now - since, 1e-3))


@contextmanager
def display() -> Iterator[Callable[[TrainingView], None]]:
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
    """Return IPython's shell if this process is the kernel of a notebook; otherwise None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if hasattr(shell, "kernel") else None


# -- events as sentences ----------------------------------------------------------------------

_SENTENCES: dict[type[events.Event], str] = {
    events.Killed: "{e.node} killed after {e.updates} updates, by {e.by}{still}{proof}",
    events.Paused: "{e.node} paused after {e.updates} updates{not_stopped}",
    events.Resumed: "{e.node} {resumed}",
    events.Disturbed: "{e.node} {e.kind} after {e.updates} updates: {e.evidence}",
    events.Undisturbed: "{e.node} is no longer disturbed: {e.evidence}",
    events.PhaseMet: "the fault struck during a {e.phase}: {e.evidence}",
    events.FaultMissed: "the fault on {e.target} did not happen: {e.reason}",
    events.FaultSkipped: "a fault on {e.target} was left out: {e.reason}",
    events.Detected: "{e.node} detected as lost by the {e.by}; shard {e.shard} {state}",
    events.Failover: "{e}",
    events.LossReported: "shard {e.shard} has lost {least}{e.updates} acknowledged updates",
    events.RolledBack: "all shards restored to cut {e.cut}, because of shard {e.shard}",
    events.CapacityRestored: "{e.node} is up and replaces the lost node",
    events.Promoted: "shard {e.shard} continues at {e.node}, at version {e.version}",
    events.Restored: "shard {e.shard} restored at {e.node} from {source}",
    events.ReplicaAdded: "shard {e.shard} has a new replica at {e.node}",
    events.Rebuilt: "shard {e.shard}: the copy of {e.donor} was {e.age_seconds:.1f} s old",
    events.Replayed: "shard {e.shard}: {e.count} buffered updates applied",
    events.CheckpointRefused: "shard {e.shard}: skipped a damaged checkpoint: {e.reason}",
    events.Moved: "shard {e.shard} moved from {e.source} to {e.target}, paused for "
    "{e.pause_seconds:.3f} s",
    events.NodeLeaving: "{e.node} is leaving: {why}",
    events.NodeDrained: "{e.node} was drained in {e.seconds:.1f} s",
    events.NodeLeft: "{e.node} left, and nothing was lost",
    events.WorkerLeft: "{e.worker} {e.reason}",
}
_WHY = {"lifetime": "its lifetime ends soon", "signal": "it received SIGTERM"}


def sentence(event: events.Event) -> str | None:
    """Return an event as a sentence; None unless it is a fault, a loss or a recovery."""
    match event:
        case events.WorkerLeft(reason="finished"):
            return None
        case events.Restored(epoch=1) | events.ReplicaAdded(epoch=1):  # while shards start up
            return None
    why, evidence = getattr(event, "why", ""), getattr(event, "evidence", "")
    gone, stopped, running = (getattr(event, n, True) for n in ("gone", "stopped", "running"))
    words = {
        "state": "continues" if getattr(event, "serving", False) else "is down",
        "least": "" if getattr(event, "exact", True) else "at least ",
        "source": restored_from(getattr(event, "source", ""), getattr(event, "version", 0)),
        "still": "" if gone else ", but its process still exists",
        "not_stopped": "" if stopped else ", but its process is not stopped",
        "resumed": "continues" if running else "does not continue",
        "proof": f" ({evidence})" if evidence else "",
        "why": _WHY.get(why, why),
    }
    template = _SENTENCES.get(type(event))
    return template and template.format(e=event, **words)
