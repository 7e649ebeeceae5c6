"""The state of a training, as every live view shows it, and its forms as text and HTML.

A parameter server collects it from its shards, `dps top` from a Dask scheduler or a growing record,
and `dps run` from the events of its trials. `dps.observe.progress` draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar

from rich.filesize import decimal

if TYPE_CHECKING:
    import pandas

T = TypeVar("T")

_NAMED = 3  # shards without copies that are named one by one
_MOST_ROWS = 40  # in an HTML table
_CELL = '<td style="text-align:left">'


@dataclass(frozen=True, slots=True)
class ShardView:
    """The state of one shard.

    Attributes
    ----------
    node
        The node that clients push to; "" if the shard is down.
    replicas
        The nodes that hold the shard, that one first.
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
        Mean number of versions that updates missed; None if unknown.
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
        Its clock for the consistency model, while it takes part; else None.
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
        return str(self._frame().to_html(index=False, border=0, max_rows=_MOST_ROWS))

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
    total: int | None = None  # their number at the end
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
            parts += ["no worker was started"]
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
