"""Resuming a group from its checkpoints alone, also on another number of shards.

A small file beside the checkpoints has the layout of the parameters and the group's choices. It is
written before the first checkpoint, with a checksum, because resuming depends on it. A
group that resumes from another one's checkpoints writes to a separate folder, as a later
generation, so processes of the earlier group change nothing there.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TypeVar

import fsspec
import msgpack
import numpy as np

from dps.core.blocks import ArraySpec, Block, Layout, Piece, ShardLayout
from dps.core.consistency import Consistency
from dps.core.filters.chain import FilterChain
from dps.core.functions import CALLS, DRIVER, most
from dps.core.leases import in_all
from dps.core.placement import ConsistentHash
from dps.core.ranges import in_a_line, listed
from dps.core.rules.rule import UpdateRule, by_rows
from dps.core.shard import ShardState
from dps.core.tables.key_routing import dealt_out
from dps.core.tables.table import Level, merged
from dps.errors import CheckpointCorrupt, ConfigurationError, DpsError, StoreUnavailable
from dps.protocol.wire import decode, encode, message
from dps.recovery.checkpoint_files import CheckpointFiles
from dps.recovery.files import NotAFile, contents, make_folder, publish, sealed, unsealed
from dps.recovery.strategy import Recovery

FILE = "run.json"
DAMAGED = ". Cannot resume from its folder; remove that folder to resume from another one beside it"

M = TypeVar("M")

for _cls in (Layout, ArraySpec, ShardLayout, Piece, Block, FilterChain):
    message(_cls)


@message
@dataclass(frozen=True, slots=True)
class Run:
    """The description of a group that can be resumed from its checkpoints; see `Group`."""

    name: str
    generation: int  # how often the group was resumed
    started: float
    layout: Layout
    rule: UpdateRule
    consistency: Consistency
    recovery: Recovery
    about: str  # the caller's own, as JSON
    filters: dict[str, FilterChain] = field(default_factory=dict)
    servers: int | None = None
    pull_filters: dict[str, FilterChain] = field(default_factory=dict)
    placement: ConsistentHash | None = None

    def __post_init__(self) -> None:
        if posixpath.basename(self.name) != self.name or self.name in ("", ".", ".."):
            raise ValueError(f"its name is {self.name!r}, expected the name of a folder")


@dataclass(frozen=True, slots=True)
class Refused:
    """A damaged checkpoint of a shard; an older one is used instead."""

    shard: int
    path: str
    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class Saved:
    """The source from which a group resumes."""

    run: Run
    states: tuple[ShardState, ...]  # of the shards
    refused: tuple[Refused, ...] = ()

    @property
    def updates(self) -> int:
        """Number of updates that every shard has."""
        return min(state.version for state in self.states)

    @property
    def applied(self) -> dict[str, int]:
        """Number of each worker's updates, in the shard that has most of them."""
        return most({n: p.applied for n, p in s.workers.items()} for s in self.states)

    def __repr__(self) -> str:
        versions = sorted({state.version for state in self.states})
        low, high = versions[0], versions[-1]
        version = f"version {low:,}" if low == high else f"versions {low:,} to {high:,}"
        applied = [f"{worker} {updates:,}" for worker, updates in sorted(self.applied.items())]
        damaged = [f"{len(self.refused):,} damaged ones skipped"] if self.refused else []
        return f"<Saved {self.run.name}: {', '.join([version, listed(applied), *damaged])}>"

    @property
    def incarnations(self) -> dict[str, int]:
        """The last incarnation of each worker that any shard knows, even if only from a call."""
        workers = (item for state in self.states for item in state.workers.items())
        known = most({name.removesuffix(CALLS): p.incarnation} for name, p in workers)
        known.pop(DRIVER, None)  # the driver calls functions, but is no worker
        return known


def as_text(value: object) -> bytes:
    """Return a message as JSON with its checksum. It has no arrays, and maps have text as keys."""
    packed = encode(value)[0].data
    header = msgpack.unpackb(packed, unicode_errors="surrogatepass")
    return sealed(json.dumps(header)).encode()


def from_text(data: bytes, path: str, kind: type[M], hint: str = "") -> M:
    """Return the message of a file's text; raises `CheckpointCorrupt`, with a hint.

    Raises `ConfigurationError` if it names something unknown, such as an unregistered rule.
    """
    try:
        header = json.loads(unsealed(data))
        packed = msgpack.packb(header, unicode_errors="surrogatepass")
        value = decode([np.frombuffer(packed, np.uint8)])
        if not isinstance(value, kind):
            raise ValueError("not a manifest of checkpoints")
        return value
    except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError, DpsError) as error:
        reason = in_a_line(str(error))
        if isinstance(error, ConfigurationError):  # such as an update rule that is not registered
            raise ConfigurationError(f"{path}: {reason}") from error
        raise CheckpointCorrupt(
            f"{path} is damaged, or of another version of dps: {reason}{hint}"
        ) from error


def must_be_known(what: str, choice: object) -> None:
    """Raise `ConfigurationError` if an update rule or filters are not registered for the wire."""
    try:
        as_text(choice)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"{what}={choice!r} cannot be kept beside checkpoints: {error}. Make it a frozen "
            "dataclass of plain values and decorate it with dps.protocol.wire.message"
        ) from error


def write_run(run: Run) -> None:
    """Write a run beside its checkpoints; raises `StoreUnavailable` if that fails."""
    path = f"{str(run.recovery.path).rstrip('/')}/{run.name}"
    try:
        fs, folder = fsspec.url_to_fs(path)
        make_folder(fs, folder)
        publish(fs, folder, FILE, as_text(run))
    except Exception as error:
        raise StoreUnavailable(f"checkpoints to {path}: {error}") from error


def find_saved(path: str) -> Saved:
    """Return what to resume from below a path: a group's folder, or the one above.

    Of several groups, it is the last generation with a whole checkpoint of every shard. Raises
    `StoreUnavailable` if there is none, and, for the description of any group, what `from_text`
    raises: the other groups may be older.
    """
    runs = sorted(_runs(path), key=lambda each: (each[0].generation, each[0].started), reverse=True)
    refused: list[Refused] = []
    for run, folder in runs:
        states = _states(run, folder, refused)
        if states is not None:
            return Saved(run, states, tuple(refused))
    if not runs:
        raise StoreUnavailable(
            f"{path}: no checkpoints of a parameter server (expected {FILE} in this folder or in "
            "one of its folders)"
        )
    raise StoreUnavailable(f"{path}: a shard has no complete checkpoint")


def _runs(path: str) -> Iterator[tuple[Run, str]]:
    """The runs below a path, each with the path of its folder."""
    try:
        fs, folder = fsspec.url_to_fs(path)
        here = fs.ls(folder, detail=False) if fs.isdir(folder) else []
    except Exception as error:
        raise StoreUnavailable(f"{path}: {error}") from error
    for place in [folder, *here]:
        file = posixpath.join(place, FILE)
        try:
            data = contents(fs, file)
        except NotAFile as error:
            raise CheckpointCorrupt(f"{file}: {error.strerror}; remove it") from error
        except OSError:
            continue  # no group's folder
        # The folder may have been moved, or have another path from here.
        root = path.rstrip("/")
        if place == folder:
            above, own = posixpath.dirname(root), root
        else:
            above, own = root, f"{root}/{posixpath.basename(place.rstrip('/'))}"
        run = from_text(data, file, Run, DAMAGED)
        yield replace(run, recovery=run.recovery.at(above)), own


def _states(run: Run, folder: str, refused: list[Refused]) -> tuple[ShardState, ...] | None:
    """A whole state of each shard, all of one cut for `scope="all"`; adds to `refused`."""
    files = [CheckpointFiles(folder, shard, 1) for shard in range(len(run.layout.shards))]
    shards = list(zip(files, run.layout.shards, strict=True))
    cuts: Sequence[int | None] = [None]
    if run.recovery.durability.scope == "all":
        numbers = [{each.cut for each in of_shard.published()} for of_shard in files]
        complete = sorted(c for c in set.intersection(*numbers) if c is not None)
        cuts = complete[::-1]
    for cut in cuts:
        newest = [_newest(*shard, cut, refused) for shard in shards]
        whole = tuple(state for state in newest if state is not None)
        if len(whole) == len(shards):
            return whole
    return None


def _newest(
    files: CheckpointFiles, layout: ShardLayout, cut: int | None, refused: list[Refused]
) -> ShardState | None:
    for checkpoint in files.published():
        if checkpoint.cut == cut:
            try:
                state = files.read(checkpoint)
                if state.values.dtype != np.uint8 or state.values.size != layout.nbytes:
                    raise CheckpointCorrupt(f"{checkpoint.manifest}: it has other parameters")
                return state
            except CheckpointCorrupt as error:
                refused.append(Refused(files.shard, checkpoint.manifest, str(error)))
    return None


def resharded(saved: Saved, shards: int) -> Saved:
    """Return what was saved, on another number of shards.

    Weights, optimizer state and rows of tables are redistributed. A shard's counters (version,
    steps, each worker's progress) cannot be: each new shard takes those of the old shard with the
    lowest version, as the whole model has no more updates than that. Raises `ConfigurationError` if
    the parameters cannot be divided into this number of shards.
    """
    run, states = saved.run, saved.states
    names = run.rule.slots
    values = run.layout.scatter({i: state.values for i, state in enumerate(states)})
    slots = {
        name: run.layout.scatter({i: state.slots[name] for i, state in enumerate(states)})
        for name in names
    }
    parts: dict[str, list[Level]] = {}
    for state in states:
        for name, table in state.tables.items():
            if (level := table.compacted()) is not None:
                parts.setdefault(name, []).append(level)
    by_table = {name: reduce(merged, levels) for name, levels in parts.items()}
    tables = run.layout.tables
    layout = Layout.of(values, shards, whole_rows=by_rows(run.rule), tables=tables)
    rows = dealt_out(layout, by_table, run.rule)
    least = min(states, key=lambda state: state.version)
    made = tuple(
        replace(
            least,
            values=layout.gather(shard, values)[0].copy(),
            slots={name: layout.gather(shard, slots[name])[0].copy() for name in names},
            tables=rows[shard],
            results={},
            batches=in_all([state.batches for state in states]),
        )
        for shard in range(shards)
    )
    return Saved(replace(run, layout=layout), made, saved.refused)
