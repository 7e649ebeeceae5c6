"""What lies beside a group's checkpoints, so that it can be brought up again from them alone.

A small file says how the parameters lie, and what was chosen for the group. It is written before
the first checkpoint, and has a checksum: what is computed from then on depends on it. A group that
goes on from another one's checkpoints writes into a folder of its own, as a later generation: what
may still live of the earlier one changes nothing there.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import fsspec
import numpy as np

from dps.core.blocks import ArraySpec, Block, Layout, Piece, ShardLayout
from dps.core.checksum import sealed, unsealed
from dps.core.consistency import Consistency
from dps.core.filters.chain import FilterChain
from dps.core.functions import CALLS, DRIVER
from dps.core.placement.hash_ring import ConsistentHash
from dps.core.rules.rule import UpdateRule
from dps.core.shard import ShardState
from dps.errors import CheckpointCorrupt, ConfigurationError, DpsError, StoreUnavailable
from dps.protocol.group import Group
from dps.protocol.recovery import Recovery
from dps.protocol.storage.checkpoint_files import (
    CheckpointFiles,
    contents,
    make_folder,
    publish,
)
from dps.protocol.storage.regular import NotAFile
from dps.protocol.wire import decode, encode, message
from dps.shown import in_a_line

FILE = "run.json"
_SHOWN = 4  # workers that are named where a saved group is shown

for _cls in (Layout, ArraySpec, ShardLayout, Piece, Block, FilterChain):
    message(_cls)


@message
@dataclass(frozen=True, slots=True)
class Run:
    """A group whose checkpoints can be gone on from.

    `about` is the caller's own, as JSON; `generation` how often it went on from an earlier one;
    `servers` and `placement` are as in `Group`.
    """

    name: str
    generation: int
    started: float
    layout: Layout
    rule: UpdateRule
    consistency: Consistency
    recovery: Recovery
    about: str
    filters: dict[str, FilterChain] = field(default_factory=dict)
    servers: int | None = None
    pull_filters: dict[str, FilterChain] = field(default_factory=dict)
    placement: ConsistentHash | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A damaged checkpoint of a shard, which an older one had to stand in for."""

    shard: int
    path: str
    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class Saved:
    """What a group goes on from: the run that saved it, each shard's state, what was damaged."""

    run: Run
    states: tuple[ShardState, ...]
    refused: tuple[Refused, ...] = ()

    @property
    def updates(self) -> int:
        """How many updates the shard that lost most still has."""
        return min(state.version for state in self.states)

    @property
    def applied(self) -> dict[str, int]:
        """How many updates of each worker the shard has that has most of them."""
        known: dict[str, int] = {}
        for state in self.states:
            for name, progress in state.workers.items():
                if not name.endswith(CALLS):
                    known[name] = max(progress.applied, known.get(name, 0))
        return known

    def __repr__(self) -> str:
        versions = [state.version for state in self.states]
        low, high = min(versions), max(versions)
        applied = sorted(self.applied.items(), key=lambda each: _by_number(each[0]))
        said = [f"version {low:,}" if low == high else f"versions {low:,} to {high:,}"]
        said += [f"{worker} {updates:,}" for worker, updates in applied[:_SHOWN]]
        if len(applied) > _SHOWN:
            said.append(f"and {len(applied) - _SHOWN:,} more workers")
        if self.refused:
            said.append(f"{len(self.refused):,} damaged left out")
        return f"<Saved {self.run.name}: {', '.join(said)}>"

    @property
    def incarnations(self) -> dict[str, int]:
        """The last incarnation of each worker that any shard knows, be it by a call alone."""
        known: dict[str, int] = {}
        for state in self.states:
            for name, progress in state.workers.items():
                worker = name.removesuffix(CALLS)
                known[worker] = max(progress.incarnation, known.get(worker, 0))
        known.pop(DRIVER, None)  # which calls, and is no worker
        return known


def _by_number(worker: str) -> tuple[str, int]:
    """Sort "worker-9" before "worker-10"."""
    kind, _, number = worker.rpartition("-")
    return (kind, int(number)) if number.isdecimal() else (worker, 0)


def describe(group: Group, generation: int, started: float, about: str) -> Run:
    """What is to be known of a group to go on from its checkpoints."""
    return Run(
        group.name,
        generation,
        started,
        group.layout,
        group.rule,
        group.consistency,
        group.recovery,
        about,
        group.filters,
        group.servers,
        group.pull_filters,
        group.placement,
    )


def must_be_known(what: str, choice: object) -> None:
    """Make sure that an update rule or filters can be written beside checkpoints.

    Raises
    ------
    ConfigurationError
        There is one of the user's own that is not registered.
    """
    try:
        encode(choice)
    except TypeError as error:
        raise ConfigurationError(
            f"{what}={choice!r} cannot be kept beside checkpoints: {error}. Make it a frozen "
            "dataclass of plain values and decorate it with dps.protocol.wire.message"
        ) from error


def write_run(run: Run) -> None:
    """Put a run's description beside its checkpoints.

    Raises
    ------
    StoreUnavailable
        The path cannot be written.
    """
    path = f"{str(run.recovery.durability.path).rstrip('/')}/{run.name}"
    try:
        fs, folder = fsspec.url_to_fs(path)
        make_folder(fs, folder)
        publish(fs, folder, FILE, sealed(encode(run)[0].tobytes().decode()).encode())
    except Exception as error:
        raise StoreUnavailable(f"checkpoints to {path}: {error}") from error


def find_saved(path: str) -> Saved:
    """Return what there is to go on from below a path: a group's folder, or the one above.

    Of several groups the last generation counts that has a whole checkpoint of every shard.

    Raises
    ------
    StoreUnavailable
        There is nothing, or nothing whole.
    CheckpointCorrupt
        The description of a group is damaged: what else is there may be older than its checkpoints.
    ConfigurationError
        It names what is not known here, such as an update rule of the user's own.
    """
    runs = sorted(_runs(path), key=lambda each: (each[0].generation, each[0].started), reverse=True)
    refused: list[Refused] = []
    for run, folder in runs:
        states = _states(run, folder, refused)
        if states is not None:
            return Saved(run, states, tuple(refused))
    if not runs:
        raise StoreUnavailable(
            f"{path}: no checkpoints of a parameter server ({FILE} is neither there nor in a "
            "folder there)"
        )
    raise StoreUnavailable(f"{path}: there is no whole checkpoint of every shard")


def _runs(path: str) -> Iterator[tuple[Run, str]]:
    """The runs that are described below a path, each with the path of its folder."""
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
            continue  # there is none
        # The folder may have been moved, or be reached by another path than it was then.
        root = path.rstrip("/")
        if place == folder:
            yield _at(_read(data, file), posixpath.dirname(root)), root
        else:
            yield _at(_read(data, file), root), f"{root}/{posixpath.basename(place.rstrip('/'))}"


def _read(data: bytes, file: str) -> Run:
    try:
        run: Run = decode([np.frombuffer(unsealed(data), np.uint8)])
        if posixpath.basename(run.name) != run.name or run.name in ("", ".", ".."):
            raise ValueError(f"its name is {run.name!r}, expected that of a folder")
    except ConfigurationError as error:
        raise ConfigurationError(f"{file}: {in_a_line(str(error))}") from error
    except (ValueError, LookupError, TypeError, AttributeError, DpsError) as error:
        raise CheckpointCorrupt(
            f"{file} is damaged, or of another version of dps: {in_a_line(str(error))}. Cannot "
            "resume from its folder; remove that folder to resume from what there is beside it"
        ) from error
    return run


def _at(run: Run, path: str) -> Run:
    return replace(run, recovery=run.recovery.at(path))


def _states(run: Run, folder: str, refused: list[Refused]) -> tuple[ShardState, ...] | None:
    """A whole state for each shard, of one cut if the shards go back together.

    What is found damaged on the way is added to `refused`.
    """
    files = [CheckpointFiles(folder, shard, 1) for shard in range(len(run.layout.shards))]
    shards = list(zip(files, run.layout.shards, strict=True))
    if not run.recovery.durability.restores_together:
        return _all_whole([_newest(*shard, None, refused) for shard in shards])
    numbers = [{found.cut for found in of_shard.found()} for of_shard in files]
    for cut in sorted((c for c in set.intersection(*numbers) if c is not None), reverse=True):
        states = _all_whole([_newest(*shard, cut, refused) for shard in shards])
        if states is not None:
            return states
    return None


def _newest(
    files: CheckpointFiles, layout: ShardLayout, cut: int | None, refused: list[Refused]
) -> ShardState | None:
    for found in files.found():
        if found.cut == cut:
            try:
                state = files.read(found)
                if state.values.dtype != np.uint8 or state.values.size != layout.nbytes:
                    raise CheckpointCorrupt(f"{found.manifest}: it is of other parameters")
                return state
            except CheckpointCorrupt as error:
                refused.append(Refused(files.shard, found.manifest, str(error)))
    return None


def _all_whole(states: Sequence[ShardState | None]) -> tuple[ShardState, ...] | None:
    whole = tuple(state for state in states if state is not None)
    return whole if len(whole) == len(states) else None


def about(run: Run) -> dict[str, object]:
    """What the caller wanted to be kept."""
    kept: dict[str, object] = json.loads(run.about)
    return kept
