"""Messages that end a training: workers push no more, while the shards stay as they are."""

from __future__ import annotations

from dataclasses import dataclass

from dps.protocol.wire import message

STOPPED = "the training was stopped by ParameterServer.stop()"


@message
@dataclass(frozen=True, slots=True)
class StopTraining:
    """To the coordinator: all workers are to end that were started before this, the `number`-th.

    It replies when none of them takes part any more, or after `patience` seconds. Reply: Ending.
    """

    number: int
    patience: float


@message
@dataclass(frozen=True, slots=True)
class Ending:
    """The workers that still take part, though they are to end."""

    left: tuple[str, ...]
