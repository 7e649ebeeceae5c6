"""How the dps links of a node are disturbed from the driver, and probed to prove it.

The switch and the order to probe go to the node over Dask's own connections, which stay as they
are. The probe itself is a message of dps like any other: from the node to the coordinator and back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dps.chaos.effect import Seen
from dps.cluster.node.presence import presence_of
from dps.cluster.platform import Platform, Running, platform_of
from dps.cluster.transport.calls import ClusterTransport, Meter
from dps.cluster.transport.links import Closed, Condition, Full, Late, links_of
from dps.errors import DeadlineExceeded, DpsError
from dps.protocol.messages import GetTable
from dps.protocol.transport import Endpoint

if TYPE_CHECKING:
    import distributed

CONTROL_SECONDS = 10.0
PROBE_SECONDS = 2.0
PROBE_OF_CLOSED = 0.25
LOOK_SECONDS = 0.1


class Remote:
    """The process of a node, as the driver reaches it: through the scheduler, by Dask's means.

    Parameters
    ----------
    coordinator
        Who is sent probes by the node.

    Attributes
    ----------
    platform
        That of the driver.
    """

    def __init__(self, client: distributed.Client, address: str, coordinator: Endpoint) -> None:
        self.platform: Platform = platform_of(client)
        self._client = client
        self._address = address
        self._coordinator = coordinator

    def impose(self, number: int, condition: Condition, seconds: float) -> None:
        """Begin a condition of the node's links; it ends by itself."""
        self.run(_impose, number, condition, seconds)

    def lift(self, number: int) -> int:
        """End a condition; return how many messages it affected."""
        self.run(_lift, number)
        return self.affected(number)

    def hide(self, seconds: float) -> None:
        """Have the monitor of the node's host say nothing of the node for a while."""
        self.run(_hide, seconds)

    def affected(self, number: int) -> int:
        """How many messages a condition has affected."""
        affected: int = self.run(_affected, number)
        return affected

    def probe(self, deadline: float) -> float | None:
        """Seconds that a message from the node and its reply take; None: there is no reply."""
        took: float | None = self.run(_probe, self._coordinator, deadline)
        return took

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Have the process run a function, and return what that returns.

        It runs on the event loop there, and must not wait but with `await`. One that takes
        `dask_worker` gets the process's Dask worker.
        """
        return self._client.sync(self._run_in_time, function, arguments)

    async def _run_in_time(self, function: Callable[..., Any], arguments: Any) -> Any:
        async with asyncio.timeout(CONTROL_SECONDS):
            replies = await self._client.run(function, *arguments, workers=[self._address])
        return replies[self._address]


class Interference:
    """Holds back or delays every message of dps that a node sends or is sent, or one way only."""

    proven = True  # a probe has felt it

    def __init__(
        self, remote: Remote, number: int, condition: Closed | Late, seconds: float
    ) -> None:
        self._remote = remote
        self._number = number
        self._condition = condition
        self._seconds = seconds

    def begin(self) -> Seen:
        """Begin the condition, and see what becomes of a probe."""
        before = self._remote.probe(PROBE_SECONDS)
        self._remote.impose(self._number, self._condition, self._seconds)
        match self._condition:
            case Closed():
                deadline = min(max(PROBE_OF_CLOSED, 2 * (before or 0)), self._seconds / 2)
                during = self._remote.probe(deadline)
                held = self._remote.affected(self._number) > 0
                # It did not just take long: the same time was enough for it before.
                effective = before is not None and before < deadline and during is None and held
            case Late(seconds, ways):
                deadline = PROBE_SECONDS + len(ways) * seconds
                during = self._remote.probe(deadline)
                effective = during is not None and during >= len(ways) * seconds
        evidence = (
            "a probe from the node to the coordinator and back took "
            f"{_told(before, PROBE_SECONDS)} before, {_told(during, deadline)} during"
        )
        return Seen(evidence, effective)

    def end(self) -> Seen:
        """End the condition, and see that a probe passes again."""
        affected = self._remote.lift(self._number)
        after = self._remote.probe(PROBE_SECONDS)
        done = "held back" if isinstance(self._condition, Closed) else "delayed"
        took = _told(after, PROBE_SECONDS)
        evidence = f"{affected} messages were {done}; a probe took {took} after"
        return Seen(evidence, after is not None and affected > 0)


class FullStore:
    """Has a store refuse whatever it is asked to keep: states and mail.

    It is asked now and then whether it has refused anything, for a store that is killed while it is
    full takes its count with it.
    """

    def __init__(self, remote: Remote, number: int, seconds: float) -> None:
        self._remote = remote
        self._number = number
        self._seconds = seconds
        self.proven = False
        self._over = remote.platform.flag()
        self._watch: Running

    def begin(self) -> Seen:
        """Begin to refuse."""
        self._remote.impose(self._number, Full(), self._seconds)
        self._watch = self._remote.platform.start(self._look, "dps-full-store")
        return Seen("it refuses to keep anything", True)

    def end(self) -> Seen:
        """Keep things again; it had no effect if nobody asked for anything to be kept."""
        self._over.set()
        self._watch.join()
        refused = self._remote.lift(self._number)
        if not refused:
            return Seen("no write was tried", False)
        return Seen(f"{refused} requests to keep something were refused", True)

    def _look(self) -> None:
        while not self.proven and not self._over.wait(LOOK_SECONDS):
            # It may be paused for a while; or it is gone, and so is what it counted.
            with suppress(LookupError, OSError, DpsError):
                self.proven = self._remote.affected(self._number) > 0


def _told(seconds: float | None, deadline: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds is not None else f"more than {1e3 * deadline:g} ms"


# -- what runs on the nodes ------------------------------------------------------------------------


async def _impose(
    number: int, condition: Condition, seconds: float, dask_worker: distributed.Worker
) -> None:
    links = links_of(dask_worker)
    links.impose(number, condition, seconds)
    if links.cut_off:  # else its monitor would vouch for it over a link that is not cut
        presence_of(dask_worker).silence(seconds)


async def _lift(number: int, dask_worker: distributed.Worker) -> None:
    links = links_of(dask_worker)
    links.lift(number)
    if not links.cut_off:
        presence_of(dask_worker).silence(0.0)


async def _hide(seconds: float, dask_worker: distributed.Worker) -> None:
    presence_of(dask_worker).silence(seconds)


async def _affected(number: int, dask_worker: distributed.Worker) -> int:
    return links_of(dask_worker).affected(number)


async def _probe(
    coordinator: Endpoint, deadline: float, dask_worker: distributed.Worker
) -> float | None:
    transport = ClusterTransport(dask_worker.rpc, Meter(), links_of(dask_worker))
    clock = platform_of(dask_worker).clock
    began = clock.monotonic()
    try:
        await transport.call(coordinator, GetTable(-1, deadline), deadline)
    except DeadlineExceeded:
        return None
    return clock.monotonic() - began
