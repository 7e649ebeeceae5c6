"""What a supervisor and the process of its program say to each other, over a pipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dps.events import Returned


@dataclass(frozen=True, slots=True)
class Known:
    """A parameter server that was up: where its checkpoints are, and how far it was seen to be.

    `versions` has a number for each shard, or is empty if none was asked yet. `contained` tells
    whether all its nodes were processes of the program's own session, which end with it.
    """

    folder: str
    versions: tuple[int, ...] = ()
    contained: bool = False


@dataclass(frozen=True, slots=True)
class Past:
    """What an incarnation of a program is told of those before it.

    `known` is by the number of the call that brought the parameter server up. `noticed` is when the
    loss was, on `time.monotonic`, which all processes of a machine share.
    """

    returns: int = 0
    cause: str = ""
    noticed: float = 0.0
    known: dict[int, Known] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scratch:
    """The process has this folder for files that nobody removes if it is killed."""

    folder: str


@dataclass(frozen=True, slots=True)
class Up:
    """A parameter server is served; `returned` says how it came back, if it did."""

    call: int
    folder: str
    returned: Returned | None


@dataclass(frozen=True, slots=True)
class Seen:
    """How many updates each shard of a parameter server has applied; the rest as in `Known`."""

    call: int
    versions: tuple[int, ...]
    contained: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """The program has returned."""

    result: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The program has raised; None stands for an error that cannot be sent."""

    error: BaseException | None
    trace: str


@dataclass(frozen=True, slots=True)
class ClusterLost:
    """The program cannot go on, as its Dask cluster is lost, or is not back yet.

    `raised` is what it raised because of that, if it has ended by it.
    """

    cause: str
    raised: Raised | None = None
