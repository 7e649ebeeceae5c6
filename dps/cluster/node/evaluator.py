"""The evaluator: an actor on a node of its own that scores snapshots of the weights.

It reads the weights as any client does, outside the consistency model, and computes on its own
node, so that measuring does not slow down the training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from dps.cluster.node.member import Member
from dps.cluster.transport.calls import Meter
from dps.cluster.transport.memory import private
from dps.core.arguments import as_number, is_name
from dps.core.ranges import shown
from dps.errors import ConfigurationError, DpsError
from dps.events import (
    SCORE_RAISED,
    SCORE_RETURNED,
    Evaluated,
    EvaluationMissed,
    Event,
    Reported,
)
from dps.observe.history import EVALUATOR
from dps.protocol.client.client import Client
from dps.protocol.group import Group

# Returns what `scored` takes.
Score = Callable[[Mapping[str, np.ndarray]], Any]


class EvaluatorActor:
    """Scores a snapshot every `every` seconds until it is finished; a Dask actor.

    `score` is called in a thread with weights of its own; see `scored`.
    """

    def __init__(self, group: Group, score: Score, every: float, node: str, key: str) -> None:
        self._member = Member(group, node, "evaluator", Meter())
        self._client = Client(group, self._member.transport)
        self._group = group
        self._score = score
        self._every = every
        self._key = key
        self._has_read = asyncio.Event()
        self._is_last = asyncio.Event()
        self._member.dask_worker.loop.add_callback(self._start)

    async def read(self) -> None:
        """Wait until the first snapshot is read: later updates are not in it."""
        await self._has_read.wait()

    async def finish(self) -> None:
        """Score once more, send the last events and stop."""
        if not self._is_last.is_set():
            self._is_last.set()
            await asyncio.wait([self._evaluating])
            await self._client.close()
            await self._member.exit()

    def _start(self) -> None:
        self._member.enter()
        tasks = self._member.tasks
        self._evaluating = tasks.keep(self._evaluate_forever, self._group.timings.flush)
        tasks.start(self._member.finish_when_released(self._key, self.finish))
        self._member.record(lambda: None)

    async def _evaluate_forever(self) -> None:
        loop, hold = asyncio.get_running_loop(), self._group.timings.hold
        while True:
            is_last, due = self._is_last.is_set(), loop.time() + self._every
            # The first one and the last one cannot be made up for.
            needs_time = is_last or not self._has_read.is_set()
            await self._evaluate(max(self._every, hold if needs_time else 0.0))
            if is_last:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._is_last.wait()

    async def _evaluate(self, seconds: float) -> None:
        clock, record = self._member.clock, self._member.recorder
        try:
            async with asyncio.timeout(seconds):
                await self._client.pull()
        except (TimeoutError, DpsError):
            reason = f"the shards could not be read within {seconds:g} s"
            record(EvaluationMissed(clock.now(), reason))
            return
        finally:
            self._has_read.set()
        read, versions = clock.now(), self._client.versions()
        weights = self._client.own_weights(self._client.read_point(), private)

        def events() -> list[Event]:
            try:
                return scored(self._score(weights), read, sum(versions) / len(versions))
            except BaseException as error:  # noqa: BLE001 - whatever the user's code raises
                return [EvaluationMissed(read, f"{SCORE_RAISED} {error!r}")]

        for event in await asyncio.get_running_loop().run_in_executor(None, events):
            record(event)


def scored(returned: Any, read: float, version: float) -> list[Event]:
    """Return the events of a score of weights that were `read` then, of this mean `version`.

    A score is the loss; loss and accuracy, optionally with the objective and the stationarity; or a
    mapping of names to numbers.
    """
    try:
        match returned:
            case tuple() | list() if len(returned) in (2, 4):
                numbers = (as_number("", each) for each in returned)
                return [Evaluated(read, version, *numbers)]
            case Mapping() if returned and all(map(is_name, returned)):
                named = {name: as_number(name, each) for name, each in returned.items()}
            case _:
                named = {"loss": as_number("", returned)}
    except ConfigurationError:
        reason = (
            f"{SCORE_RETURNED} {shown(returned)}, expected a number (the loss), a pair of loss and "
            "accuracy, or a mapping of names to numbers"
        )
        return [EvaluationMissed(read, reason)]
    step = (round(version),)
    return [
        Reported(read, EVALUATOR, 0, name, (read,), (0,), (number,), step)
        for name, number in named.items()
    ]
