"""The driver's end of the topics of its group: events, and reports of dropped updates."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dps.cluster.driver.news import News
from dps.cluster.driver.setup import Start
from dps.cluster.names import topic
from dps.cluster.node.logs import dropped
from dps.cluster.platform import platform_of, weakly
from dps.errors import UpdatesDroppedWarning
from dps.events import EvaluationMissed, Event, from_dict
from dps.observe.history import History

if TYPE_CHECKING:
    import distributed

DRAIN_SECONDS = 10.0


class Inbox:
    """Receives the events of a group. Used from the client's event loop.

    Each goes into the `history`, and to the user's `on_event`; without one, a score that fails is a
    warning.
    """

    def __init__(
        self, client: distributed.Client, start: Start, history: History, news: News
    ) -> None:
        self._client = client
        self._group = start.group
        self._sink = start.options.on_event
        self._history = history
        self._news = news
        self._events = topic("events", start.group.name)
        self._drops = topic("dropped", start.group.name)
        self._warned_of_score = self._warned_of_drops = False
        self._markers: Counter[str] = Counter()

    def open(self) -> None:
        """Begin to receive."""
        self._client.subscribe_topic(self._events, weakly(self._receive))
        self._client.subscribe_topic(self._drops, weakly(self._warn_of_drops))

    async def close(self, nodes: Sequence[str] | None) -> None:
        """Stop receiving, once everything that live nodes have sent has arrived: see `catch_up`."""
        try:
            await self.catch_up(nodes)
        finally:
            self._client.unsubscribe_topic(self._events)
            self._client.unsubscribe_topic(self._drops)

    async def catch_up(self, nodes: Sequence[str] | None) -> None:
        """Return when everything has arrived that live nodes have sent, or after a while.

        The scheduler and each of the `nodes`, by address (None: all of the cluster), send a marker
        after their events, over the same connection.
        """
        marker = platform_of(self._client).token()
        send = partial(_send_marker, self._events, marker)
        sent = await self._client.run(send, workers=nodes, on_error="ignore")
        await self._client.log_event(self._events, [{"marker": marker}])
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while self._markers[marker] <= len(sent):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return  # a node was lost meanwhile; its last events are lost with it
        finally:
            del self._markers[marker]

    async def _receive(self, event: tuple[float, Any]) -> None:
        for record in event[1]:
            if "marker" in record:
                self._markers[record["marker"]] += 1
            else:
                self._take(from_dict(record))

    def _take(self, event: Event) -> None:
        try:
            self._history.add(event)
        except Exception as error:  # noqa: BLE001 - the user may report what is no number
            self._news.failed(f"the history lacks numbers of {type(event).__name__}", error)
        if self._sink is not None:
            try:
                self._sink(event)
            except BaseException as error:  # noqa: BLE001 - the user's code must not end Dask's loop
                self._news.failed(f"on_event failed on {type(event).__name__}", error)
        elif isinstance(event, EvaluationMissed) and event.score_failed:
            if not self._warned_of_score:
                self._news.warn(f"no evaluation, because {event.reason}", RuntimeWarning)
            self._warned_of_score = True

    async def _warn_of_drops(self, event: tuple[float, Any]) -> None:
        if not self._warned_of_drops:
            self._warned_of_drops = True
            self._news.warn(dropped(self._group, str(event[1])), UpdatesDroppedWarning)


def _send_marker(topic: str, marker: str, dask_worker: Any) -> None:
    dask_worker.log_event(topic, [{"marker": marker}])
