"""Messages that read weights and rows of sparse tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dps.core.shard import Progress
from dps.core.updates import Encoding
from dps.protocol.wire import message


@message
@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """What a shard's state is besides its weights, and the epoch in which they were read."""

    epoch: int
    index: int
    steps: int
    workers: dict[str, Progress]
    results: dict[str, np.ndarray]


@message
@dataclass(frozen=True, slots=True)
class CopyId:
    """Names what a worker has of a shard's weights where pulls are filtered: no two are alike.

    `holder` is the replica that has sent it, `number` counts what that one has sent.
    """

    holder: str
    number: int


@message
@dataclass(frozen=True, slots=True)
class Weights:
    """A shard's values at `version`, read at `at` (seconds since the Unix epoch).

    `slack` is how many further gradients the consistency model lets the worker compute from them
    without reading again; -1: any number. `metadata` is there if workers' copies are of use.
    Where pulls are filtered, the worker has the copy `copy` then; with `since`, `values` is what
    has to be done to that one for it, as `codec` describes.
    """

    version: int
    at: float
    slack: int
    values: np.ndarray
    metadata: ShardMetadata | None = None
    copy: CopyId | None = None
    since: CopyId | None = None
    codec: tuple[Encoding, ...] = ()


@message
@dataclass(frozen=True, slots=True)
class Waiting:
    """The consistency model still makes the worker wait, or what it sent is not durable; ask again.

    `reason` is why it could not be made durable, if that has failed. `for_workers` tells whether
    only other workers are waited for, who may be slow.
    """

    reason: str = ""
    for_workers: bool = False


@message
@dataclass(frozen=True, slots=True)
class Pull:
    """Read the weights; `worker` waits as the consistency model says, "" never waits.

    `seen` is the version that the client has read before: it is not shown an older one, unless
    that one is lost. `has` is the copy that it has, where pulls are filtered.
    """

    shard: int
    epoch: int
    worker: str
    incarnation: int
    seen: int
    patience: float
    has: CopyId | None = None


@message
@dataclass(frozen=True, slots=True)
class PullRows:
    """Read rows of a table by their keys, int64 and sorted; else like `Pull`. Reply: RowsRead."""

    shard: int
    epoch: int
    worker: str
    incarnation: int
    seen: int
    patience: float
    table: str
    keys: np.ndarray


@message
@dataclass(frozen=True, slots=True)
class PullRange:
    """Read the rows that exist with keys from `start` to below `stop`; else like `PullRows`."""

    shard: int
    epoch: int
    worker: str
    incarnation: int
    seen: int
    patience: float
    table: str
    start: int
    stop: int


RowsAsked = PullRows | PullRange


@message
@dataclass(frozen=True, slots=True)
class RowsRead:
    """Rows of a table as they are at a shard's `version`, read at `at` (seconds since the epoch).

    The keys are those that were asked for, and not sent back, or those in the range, sorted.
    """

    version: int
    at: float
    keys: np.ndarray | None
    values: np.ndarray
