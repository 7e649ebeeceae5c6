"""The driver's end of the event stream: what the group records arrives here, in batches.

What workers report and evaluators score goes into the history, whether anybody listens or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dps.cluster.driver.news import News
from dps.cluster.node.recorder import topic
from dps.cluster.node.weak import weakly
from dps.cluster.platform import platform_of
from dps.events import EvaluationMissed, Event, Sink, from_dict
from dps.observe.history import History

if TYPE_CHECKING:
    import distributed

DRAIN_SECONDS = 10.0


class Inbox:
    """Hands the events of a group on. Used from the client's event loop.

    Parameters
    ----------
    sink
        Called with every event; None: nobody wants them, so a score that fails is warned of here.
    history
        Keeps what events hold of the course of the training; None: nobody wants it.
    news
        Is told if the sink or a score fails; None: nobody wants to know.
    """

    def __init__(
        self,
        client: distributed.Client,
        group: str,
        sink: Sink | None,
        history: History | None = None,
        news: News | None = None,
    ) -> None:
        self._client = client
        self._topic = topic(group)
        self._sink = sink
        self._history = history or History()
        self._news = news or News(client)
        self._warned = False
        self._markers: dict[str, int] = {}

    def open(self) -> None:
        """Begin to receive."""
        self._client.subscribe_topic(self._topic, weakly(self._receive))

    async def close(self, nodes: Sequence[str] | None = None) -> None:
        """Stop receiving, once everything that live nodes have sent has arrived: see `catch_up`."""
        try:
            await self.catch_up(nodes)
        finally:
            self._client.unsubscribe_topic(self._topic)

    async def catch_up(self, nodes: Sequence[str] | None = None) -> None:
        """Return when everything has arrived that live nodes have sent, or after a while.

        Each node, and the scheduler, sends a marker after its events, over the same connection.

        Parameters
        ----------
        nodes
            The addresses of the group's nodes; None: all of the cluster.
        """
        marker = platform_of(self._client).token()
        send = partial(_send_marker, self._topic, marker)
        sent = await self._client.run(send, workers=nodes, on_error="ignore")
        await self._client.log_event(self._topic, [{"marker": marker}])
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while self._markers.get(marker, 0) <= len(sent):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return  # a node was lost meanwhile; its last events are lost with it
        finally:
            self._markers.pop(marker, None)

    async def _receive(self, event: tuple[float, Any]) -> None:
        for record in event[1]:
            if "marker" in record:
                self._markers[record["marker"]] = self._markers.get(record["marker"], 0) + 1
            else:
                self._take(from_dict(record))

    def _take(self, event: Event) -> None:
        try:
            self._history.add(event)
        except Exception as error:  # noqa: BLE001 - a number of the user's that is none
            self._news.failed(f"the history lacks numbers of {type(event).__name__}", error)
        if self._sink is not None:
            try:
                self._sink(event)
            except BaseException as error:  # noqa: BLE001 - of the user: Dask's loop would end
                self._news.failed(f"on_event failed on {type(event).__name__}", error)
        elif isinstance(event, EvaluationMissed) and event.score_failed and not self._warned:
            self._warned = True
            self._news.warn(f"no evaluation, for {event.reason}", RuntimeWarning)


def _send_marker(name: str, marker: str, dask_worker: Any) -> None:
    dask_worker.log_event(name, [{"marker": marker}])
