"""What a user is shown of a training: shards and workers, as values, as text and as HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypeVar

from dps.shown import block, brief, pairs_html, table_html

T = TypeVar("T")

_UNITS = ("B", "kB", "MB", "GB", "TB")
_NAMED = 3  # of more shards that lack copies there is no more than their number
_FOLDED = 8  # of so many shards or workers there is no more than their number, until it is opened


@dataclass(frozen=True, slots=True)
class ShardView:
    """How it stands with one shard.

    Attributes
    ----------
    node
        The node that clients push to; "" if the shard is down.
    replicas
        The nodes that hold it, that one first.
    version
        How many updates it has applied; None: it has not said so.
    epoch
        Grows with every failure and every move.
    nbytes
        Bytes of weights, optimizer state and rows of tables, on one of the replicas.
    address
        The address of that node as Dask has it, such as "tcp://127.0.0.1:40123"; "" if the shard is
        down. `client.run(os.getpid, workers=[address])` asks it for the number of its process.
    wanted
        How many replicas were asked for; while there are fewer, it survives fewer losses.
    """

    shard: int
    node: str
    replicas: tuple[str, ...]
    version: int | None
    epoch: int
    nbytes: int
    address: str = ""
    wanted: int = 1

    @property
    def serving(self) -> bool:
        """Whether anybody serves it."""
        return bool(self.replicas)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """How it stands with one worker.

    Attributes
    ----------
    status
        "waiting" (for a thread, or to be let in), "running", "finished", "failed", "stopped" or
        "cancelled".
    updates
        How many of its gradients are applied, on the shard that has most of them. Those of earlier
        incarnations count, and those of before `ParameterServer.resume`; what is on its way, or was
        refused, does not.
    clock
        Its clock while it takes part, which the consistency model compares; else None.
    rate
        Of these, how many a second, over the last ten seconds at most; 0 if it has pushed nothing
        meanwhile, None: it is not running.
    reported
        The last number that it has reported under each name.
    """

    worker: str
    status: str
    updates: int
    clock: int | None
    rate: float | None
    reported: Mapping[str, float] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether its function has ended, in whatever way."""
        return self.status not in ("waiting", "running")

    @property
    def loss(self) -> float | None:
        """The last loss that it has reported, if it reports any."""
        return self.reported.get("loss")


class Listing(tuple[T, ...]):
    """Views, one for each shard or worker: a tuple that is shown as a table.

    `pandas.DataFrame(list(listing))` makes a data frame of it.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return text_table(*_rows_of(self)) if self else "()"

    def _repr_html_(self) -> str:
        return table_html(*_rows_of(self)) if self else "<i>none</i>"


Columns = tuple[str, ...]
Rows = list[tuple[str, ...]]

_SHARDS: dict[str, Callable[[ShardView], str]] = {
    "shard": lambda s: str(s.shard),
    "node": lambda s: s.node or "down",
    "version": lambda s: _or_dash(s.version),
    "epoch": lambda s: str(s.epoch),
    "copies": lambda s: f"{len(s.replicas)} of {s.wanted}",
    "other replicas": lambda s: ", ".join(s.replicas[1:]) or "–",
    "size": lambda s: size(s.nbytes),
    "address": lambda s: s.address or "–",
}
_WORKERS: dict[str, Callable[[WorkerView], str]] = {
    "worker": lambda w: w.worker,
    "status": lambda w: w.status,
    "gradients": lambda w: f"{w.updates:,}",
    "clock": lambda w: _or_dash(w.clock),
    "gradients/s": lambda w: _or_dash(w.rate, ".1f"),
    "loss": lambda w: _or_dash(w.loss, ".4g"),
}


def _rows_of(views: Sequence[Any]) -> tuple[Columns, Rows]:
    columns: Mapping[str, Callable[[Any], str]]
    columns = _SHARDS if isinstance(views[0], ShardView) else _WORKERS
    return tuple(columns), [tuple(cell(view) for cell in columns.values()) for view in views]


def text_table(columns: Columns, rows: Rows) -> str:
    """Return a table as lines of text."""
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


@dataclass(frozen=True, slots=True)
class Overview:
    """A parameter server at a glance.

    `parameters` and `nbytes` are of the weights, once; `notes` are what is worth knowing first,
    such as that updates were lost; `choices` are name → what was chosen.
    """

    name: str
    closed: bool
    arrays: int
    tables: int
    parameters: int
    nbytes: int
    choices: Mapping[str, Any]
    shards: Listing[ShardView]
    workers: Listing[WorkerView]
    notes: tuple[str, ...] = ()

    @property
    def _numbers(self) -> list[str]:
        """How many parameters there are; rows of tables are counted by their shards, in bytes."""
        return [f"{self.parameters:,} parameters{' in arrays' * (self.tables > 0)}"] * (
            self.arrays > 0
        )

    def line(self) -> str:
        """Return one line of text, as `repr` has it."""
        said = [
            _many(self.arrays, "array")
            + (f" and {_many(self.tables, 'table')}" * (self.tables > 0)),
            *self._numbers,
            _many(len(self.shards), "shard"),
            *(f"{name}={brief(choice)}" for name, choice in self.choices.items()),
        ]
        running = sum(worker.status == "running" for worker in self.workers)
        said += (
            [f"{_many(len(self.workers), 'worker')} ({running} running)"] if self.workers else []
        )
        state = " closed" if self.closed else ""
        notes = "".join(f"; {note}" for note in self.notes)
        return f"<ParameterServer {self.name}{state}: {', '.join(said)}{notes}>"

    def html(self) -> str:
        """Return a block of HTML, as notebooks show it."""
        what = [
            _many(self.arrays, "array"),
            *([_many(self.tables, "table")] if self.tables else []),
            *self._numbers,
            size(self.nbytes),
        ]
        choices = [(name, brief(choice)) for name, choice in self.choices.items()]
        return block(
            f"ParameterServer {self.name}{' (closed)' if self.closed else ''}",
            " · ".join(what),
            *(f'<div style="margin:0.4em 0"><b>⚠ {escape(note)}</b></div>' for note in self.notes),
            pairs_html(choices),
            _section("Shards", self.shards),
            _section("Workers", self.workers),
        )


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


def size(nbytes: int) -> str:
    """Return a number of bytes as people write it: powers of 1000."""
    number = float(nbytes)
    for unit in _UNITS:
        if number < 999.5 or unit == _UNITS[-1]:
            return (
                f"{number:.0f} {unit}" if unit == "B" or number >= 99.5 else f"{number:.1f} {unit}"
            )
        number /= 1000
    raise AssertionError


def _section(name: str, views: Listing[Any]) -> str:
    if not views:
        return ""
    is_open = " open" if len(views) <= _FOLDED else ""
    head = f"<summary><b>{name}</b> ({len(views)})</summary>"
    return f"<details{is_open}>{head}{views._repr_html_()}</details>"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _or_dash(value: float | None, form: str = ",") -> str:
    return "–" if value is None else format(value, form)
