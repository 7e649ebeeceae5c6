"""The messages between a supervisor and the programs that it runs; Dask is not imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dps.events import Returned


@dataclass(frozen=True, slots=True)
class Serving:
    """A parameter server is up, or has made progress."""

    call: int  # the number of the program's call that started it
    folder: str  # of its checkpoints
    versions: tuple[int, ...] = ()  # of the shards; empty before the first report
    contained: bool = False  # whether all its nodes are of the program's session, and end with it
    returned: Returned | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """The earlier incarnations of a program, as the supervisor sends them to the next one."""

    returns: int = 0
    cause: str = ""
    noticed: float = 0.0  # on `time.monotonic`, which all processes of a machine share
    known: dict[int, Serving] = field(default_factory=dict)  # the last message of each call


@dataclass(frozen=True, slots=True)
class Finished:
    """The program has returned."""

    result: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The program has raised an error, which is None if it cannot be sent."""

    error: BaseException | None
    trace: str


@dataclass(frozen=True, slots=True)
class ClusterLost:
    """The program has lost its Dask cluster, or does not find one after a return."""

    cause: str
    raised: Raised | None = None  # what the program raised because of the loss
