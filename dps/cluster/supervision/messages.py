"""What a supervisor and the process of its program send each other over a pipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dps.events import Returned


@dataclass(frozen=True, slots=True)
class Known:
    """A parameter server that was up: where its checkpoints are, and its last known progress.

    `versions` has a number for each shard, and is empty before the first report. `contained` is
    whether all its nodes were processes of the program's own session, which end with it.
    """

    folder: str
    versions: tuple[int, ...] = ()
    contained: bool = False


@dataclass(frozen=True, slots=True)
class Past:
    """What an incarnation of a program is told of the earlier ones.

    `known` is by the number of the call that brought the parameter server up. `noticed` is the time
    of the loss, on `time.monotonic`, which all processes of a machine share.
    """

    returns: int = 0
    cause: str = ""
    noticed: float = 0.0
    known: dict[int, Known] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Serving:
    """A parameter server is up, or has made progress; `returned` describes its return, if any."""

    call: int
    known: Known
    returned: Returned | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The program has returned."""

    result: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The program has raised an error; None if that cannot be sent."""

    error: BaseException | None
    trace: str


@dataclass(frozen=True, slots=True)
class ClusterLost:
    """The program has lost its Dask cluster, or does not find it after a return.

    `raised` is the error that this has ended the program with, if any.
    """

    cause: str
    raised: Raised | None = None
