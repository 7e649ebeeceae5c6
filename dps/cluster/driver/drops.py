"""What the driver is told of updates that were refused as too stale: a Python warning, once."""

from __future__ import annotations

from typing import Any

import distributed

from dps.cluster.driver.news import News
from dps.cluster.node.drop_log import drop_topic, dropped
from dps.cluster.node.weak import weakly
from dps.errors import UpdatesDroppedWarning
from dps.protocol.group import Group


class DropWatch:
    """Warns of the first updates of a group that are dropped. Used from the client's event loop."""

    def __init__(self, client: distributed.Client, group: Group, news: News) -> None:
        self._client = client
        self._group = group
        self._news = news
        self._warned = False

    def open(self) -> None:
        """Begin to listen."""
        self._client.subscribe_topic(drop_topic(self._group.name), weakly(self._told))

    def close(self) -> None:
        """Stop listening."""
        self._client.unsubscribe_topic(drop_topic(self._group.name))

    async def _told(self, event: tuple[float, Any]) -> None:
        if not self._warned:
            self._warned = True
            self._news.warn(dropped(self._group, str(event[1])), UpdatesDroppedWarning)
