"""The evaluator: an actor on a node of its own that scores snapshots of the weights.

It reads the weights as any client does, without taking part in the consistency gates, and computes
on its own node, so that measuring does not hold up what is measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from distributed import get_worker

from dps.cluster.node.cleanup import finish_when_let_go
from dps.cluster.node.connecting import transport_of
from dps.cluster.node.recorder import joined, keep_recording, recorded_tasks, recorder_of, sample
from dps.cluster.node.shutdown import leave_of
from dps.cluster.platform import platform_of
from dps.cluster.transport.calls import Meter
from dps.cluster.transport.memory import private
from dps.cluster.transport.port import port_of
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
    ResourceSampled,
)
from dps.observe.history import EVALUATOR
from dps.protocol.client.client import Client
from dps.protocol.group import Group

# Returns what `scored` takes.
Score = Callable[[Mapping[str, np.ndarray]], Any]


class EvaluatorActor:
    """Scores a snapshot every so many seconds until it is finished; a Dask actor.

    Parameters
    ----------
    score
        Called in a thread with weights of its own; see `scored`.
    every
        Seconds from one evaluation to the next, and how long it tries to read a snapshot; for the
        first and the last one, which cannot be made up for, at least `Timings.hold`.
    """

    def __init__(self, group: Group, score: Score, every: float, node: str, key: str) -> None:
        dask_worker = get_worker()
        self._dask_worker = dask_worker
        self._key = key
        self._finished = False
        self._has_read = asyncio.Event()
        self._group = group
        self._score = score
        self._every = every
        self._node = node
        self._platform = platform = platform_of(dask_worker)
        self._clock = platform.clock
        self._meter = Meter()
        self._recorder = recorder_of(group, dask_worker.log_event)
        transport = transport_of(dask_worker, group, node, self._meter, self._recorder)
        self._client = Client(group, transport)
        self._tasks = recorded_tasks(self._recorder, self._clock, node)
        self._recorder(joined(node, "evaluator", platform))
        dask_worker.loop.add_callback(self._start)

    async def read(self) -> None:
        """Wait until the first snapshot is read: what is applied later is not in it."""
        await self._has_read.wait()

    async def finish(self) -> None:
        """Score once more, send the last events and stop."""
        if self._finished:
            return
        self._finished = True
        self._last.set()
        await asyncio.wait([self._evaluating])
        await self._client.close()
        self._recording.cancel()
        self._recorder(self._sample())
        self._recorder.send()
        port_of(self._dask_worker).exit()
        leave_of(self._dask_worker).exit(self._group.name)

    def _start(self) -> None:
        leave_of(self._dask_worker).enter(self._group.name)
        port_of(self._dask_worker).enter()
        self._last = asyncio.Event()
        every = self._group.timings.flush
        self._evaluating = self._tasks.keep(self._evaluate_forever, every)
        self._tasks.start(finish_when_let_go(self._dask_worker, self._key, self.finish))
        self._recording = keep_recording(
            self._tasks, self._recorder, every, self._sample, keeps=True
        )

    async def _evaluate_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            last, due = self._last.is_set(), loop.time() + self._every
            only_chance = last or not self._has_read.is_set()
            patience = self._group.timings.hold if only_chance else 0.0
            await self._evaluate(max(self._every, patience))
            if last:
                return
            try:
                async with asyncio.timeout_at(due):
                    await self._last.wait()
            except TimeoutError:
                continue

    async def _evaluate(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._client.pull()
        except (TimeoutError, DpsError):
            reason = f"the shards could not be read within {seconds:g} s"
            self._recorder(EvaluationMissed(self._clock.now(), reason))
            return
        finally:
            self._has_read.set()
        read = self._clock.now()
        versions = self._client.versions()
        weights = self._client.own_weights(self._client.read_point(), private)
        version = sum(versions) / len(versions)
        loop = asyncio.get_running_loop()
        scoring = loop.run_in_executor(None, self._events, weights, read, version)
        for event in await scoring:
            self._recorder(event)

    def _events(
        self, weights: Mapping[str, np.ndarray], read: float, version: float
    ) -> list[Event]:
        """Score weights, in any thread; return what is to be recorded of it."""
        try:
            return scored(self._score(weights), read, version)
        except BaseException as error:  # noqa: BLE001 - whatever the user's code raises
            return [EvaluationMissed(read, f"{SCORE_RAISED} {error!r}")]

    def _sample(self) -> ResourceSampled:
        return sample(self._node, "evaluator", self._meter, platform=self._platform)


def scored(returned: Any, read: float, version: float) -> list[Event]:
    """Return the events of what a score has returned for weights read at a time.

    Parameters
    ----------
    returned
        The loss; loss and accuracy, and the objective and the stationarity if it wants; or name →
        number. Anything else is no score.
    version
        The mean of the versions of the shards.
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
