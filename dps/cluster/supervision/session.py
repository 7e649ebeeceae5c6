"""What a supervised program is given: parameter servers that go on from their checkpoints.

A thread of its own tells the supervisor how far the shards are, so that it is known later how much
was lost at least.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from distributed.comm import CommClosedError

from dps.cluster.driver.group_driver import SchedulerConnection
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.driver.setup import check_client, checked_recovery
from dps.cluster.platform import platform_of
from dps.cluster.supervision.messages import (
    ClusterLost,
    Finished,
    Known,
    Past,
    Raised,
    Seen,
    Up,
)
from dps.cluster.transport.memory import here
from dps.core.shard import Progress, ShardState
from dps.errors import CapacityError, ConfigurationError, DeadlineExceeded, SchedulerLost
from dps.events import Returned
from dps.protocol.timings import Timings

if TYPE_CHECKING:
    import distributed

M = TypeVar("M", Finished, Raised)

LOOK_SECONDS = 0.05
MOMENT_SECONDS = 0.5
TELL_SECONDS = 0.25

# What Dask and dps raise where there is no cluster, or whose scheduler dies as it starts.
NO_CLUSTER = (
    *(ConnectionError, TimeoutError, EOFError, CommClosedError),
    *(CapacityError, SchedulerLost),
)
CONNECTING = ("distributed", "dps.cluster")  # where these come from, and not from the program
NOTHING = Progress(0, 0, 0, 0, active=False)  # of a worker that a shard does not know

# What `ParameterServer.resume` takes as well: the rest is in the checkpoints.
_NOT_SAVED = ("on_event", "timings", "functions", "seats", "labels", "on_loss", "transport")


class Session:
    """One incarnation of a supervised program, as the program sees it.

    Attributes
    ----------
    returns
        How often the program was started again before: 0 at first.
    cause
        What the incarnation before ended by; "" at first.
    """

    def __init__(self, link: Connection, past: Past) -> None:
        self.returns = past.returns
        self.cause = past.cause
        self._past = past
        self._link = link
        self._saying = threading.Lock()
        self._calls = 0
        self._watches: list[SchedulerWatch] = []
        self._is_up = False  # or was

    def parameter_server(
        self,
        client: distributed.Client,
        params: Mapping[str, np.ndarray],
        **choices: Any,
    ) -> ParameterServer:
        """Bring a parameter server up: anew the first time, from its checkpoints afterwards.

        What an earlier incarnation of the program has brought up by its first call of this method
        is gone on with by the first call, and so on. All processes of the earlier incarnation's
        session that were this machine's have ended by then; of others, it is waited until none of
        its hosts is on a Dask worker, and until every lease that it may have had is over.

        Parameters
        ----------
        client
            A synchronous Dask client.
        params, choices
            As for `ParameterServer`; the recovery must write checkpoints of whole shards, so
            `PartialCheckpoint` is refused. When it goes on,
            parameters, rule, consistency, recovery and so on are those of the checkpoints, as for
            `ParameterServer.resume`.

        Raises
        ------
        ConfigurationError
            The client is asynchronous, or the recovery writes no checkpoints, or such as a
            shard is restored from in parts.
        StoreUnavailable
            The checkpoints of a parameter server that was up cannot be read. It does not begin
            anew in their place.
        DeadlineExceeded
            Hosts of the earlier incarnation did not end, or a Dask worker does not say whether it
            has any.
        """
        check_client(client)
        if client.asynchronous:
            raise ConfigurationError("a supervised program needs a synchronous Dask client")
        recovery = checked_recovery(choices.get("recovery", "none"), platform_of(client))
        if not recovery.durability.writes_checkpoints:
            raise ConfigurationError(
                f"a supervised program goes on from checkpoints, and {recovery.durability!r} "
                "writes none: give recovery=Recovery(Checkpoint(path=...))"
            )
        if recovery.durability.restores_in_parts:
            raise ConfigurationError(
                f"a supervised program says after a return how many updates are lost, and from "
                f"{recovery.durability!r} some blocks of a shard come back older than others, by "
                "updates that nobody counts: give recovery=Recovery(Checkpoint(path=...))"
            )
        call, self._calls = self._calls, self._calls + 1
        watch = SchedulerWatch(client, self._say_lost)
        self._watches.append(watch)
        try:
            ps = self._brought_up(call, client, params, choices)
        except BaseException:
            watch.end()
            raise
        watch.is_up(ps)
        self._is_up = True
        tell = threading.Thread(target=self._tell, args=(call, ps, client), daemon=True)
        tell.start()
        return ps

    def _brought_up(
        self,
        call: int,
        client: distributed.Client,
        params: Mapping[str, np.ndarray],
        choices: Mapping[str, Any],
    ) -> ParameterServer:
        """Bring a parameter server up, and say so when all of it is in checkpoints."""
        known = self._past.known.get(call)
        if known is None:
            ps = ParameterServer(client, params, **choices)
        else:
            self._settle(client, known, choices.get("timings", Timings()))
            kept = {name: choices[name] for name in _NOT_SAVED if name in choices}
            ps = ParameterServer.resume(client, known.folder, **kept)
        try:
            ps.checkpoint()  # of a durability that would write the first one later
        except BaseException:
            ps.close(checkpoint=False)
            raise
        returned = self._returned(known, ps) if self.returns else None
        self._say(Up(call, _folder(ps), returned))
        if returned is not None and (sink := choices.get("on_event")) is not None:
            client.loop.add_callback(sink, returned)
        return ps

    def finish(self, message: Finished | Raised) -> None:
        """Say how the program has ended.

        An error that came of the loss of the scheduler is not the program's own.
        """
        if isinstance(message, Raised) and (cause := self._outer_cause(message)):
            self._say(ClusterLost(cause, _sendable(message)))
            return
        self._say(_sendable(message))

    def _outer_cause(self, message: Raised) -> str:
        """What an error came of, if it is not the program's own; "" if it is."""
        lost = next((watch.lost for watch in self._watches if watch.lost), "")
        error = message.error
        if not lost and self.returns and not self._is_up and _is_no_cluster(error):
            # A scheduler that somebody else runs may be on its way back, and this one may die, too.
            return f"the program found no cluster ({type(error).__name__}: {error})"
        return lost

    def _returned(self, known: Known | None, ps: ParameterServer) -> Returned:
        states = ps.saved.states if ps.saved is not None else ()
        versions = tuple(state.version for state in states)
        lost = _lost(states, known.versions if known is not None else ())
        seconds = time.monotonic() - self._past.noticed
        return Returned(time.time(), self.cause, self.returns, seconds, versions, lost)

    def _settle(self, client: distributed.Client, known: Known, timings: Timings) -> None:
        """Wait until nothing of the earlier incarnation acknowledges or writes any more."""
        group = known.folder.rpartition("/")[2]
        until = time.monotonic() + timings.unavailable
        while True:
            left = max(LOOK_SECONDS, until - time.monotonic())
            holding, silent = client.sync(_asked, client, group, left)
            if silent:
                raise DeadlineExceeded(
                    f"the Dask workers {', '.join(silent)} do not answer for "
                    f"{timings.unavailable:g} s, so they may have hosts of the parameter server "
                    f"{group} still; end or restart these"
                )
            if not holding:
                break
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"hosts of the parameter server {group} are still on Dask workers after "
                    f"{timings.unavailable:g} s; restart these"
                )
            time.sleep(LOOK_SECONDS)
        if not known.contained:  # a host out of reach may have its lease still
            time.sleep(max(0.0, self._past.noticed + timings.lease - time.monotonic()))

    def _tell(self, call: int, ps: ParameterServer, client: distributed.Client) -> None:
        nodes: set[str] = set()
        contained = True
        while not ps.closed and not ps.scheduler_lost:
            try:
                versions = [shard.version for shard in ps.shards]
                if new := {node.address for node in ps.nodes} - nodes:
                    nodes |= new
                    contained = contained and _are_contained(client, new)
            except Exception:
                if ps.closed or ps.scheduler_lost:  # meanwhile
                    return
                raise
            if None not in versions:
                self._say(Seen(call, tuple(version or 0 for version in versions), contained))
            time.sleep(TELL_SECONDS)

    def _say_lost(self, cause: str) -> None:
        self._say(ClusterLost(cause))

    def _say(self, message: Any) -> None:
        with self._saying:
            self._link.send(message)


def _sendable(message: M) -> M | Raised:
    """What can be sent of how a program has ended."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(message))
    except Exception:  # noqa: BLE001 (whatever an object of the program's own raises)
        own = message.trace if isinstance(message, Raised) else traceback.format_exc()
        return Raised(None, own)
    return message


def _is_no_cluster(error: BaseException | None) -> bool:
    """Whether an error says that Dask or dps had no connection: not one of the program's own."""
    # Dask has no class of its own for attempts to connect that took too long.
    if error is None or not (type(error) is OSError or isinstance(error, NO_CLUSTER)):
        return False
    frames = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return any(_is_of(name, CONNECTING) and not _is_of(name, (__package__,)) for name in frames)


def _is_of(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _lost(states: Sequence[ShardState], seen: Sequence[int]) -> tuple[int, ...]:
    """How many updates each shard lacks at least, of those that it was seen to have.

    Every update is sent to every shard, and those that one of them has are not computed again: so
    shards that are behind another one lack them as well.
    """
    most = seen or [0] * len(states)
    return tuple(
        max(known - state.version, _behind(state, states))
        for known, state in zip(most, states, strict=True)
    )


def _behind(state: ShardState, states: Sequence[ShardState]) -> int:
    """How many updates of the last incarnations of workers a shard lacks that another one has."""
    return sum(
        max(_gap(state.workers.get(name, NOTHING), other) for other in _of(name, states))
        for name in {name for each in states for name in each.workers}
    )


def _gap(here: Progress, there: Progress) -> int:
    """How many updates of a worker are there and not here, without what was missing for longer."""
    if here.incarnation > there.incarnation:
        return 0
    numbers = there.seq - (here.seq if here.incarnation == there.incarnation else 0)
    return max(0, min(numbers, there.applied - here.applied))


def _of(name: str, states: Sequence[ShardState]) -> list[Progress]:
    return [state.workers[name] for state in states if name in state.workers]


def _folder(ps: ParameterServer) -> str:
    """Where the checkpoints of a parameter server are."""
    return f"{str(ps.recovery.durability.path).rstrip('/')}/{ps.name}"


async def _asked(
    client: distributed.Client, group: str, seconds: float
) -> tuple[list[str], list[str]]:
    """Which Dask workers have something of a group, and which do not say so in time."""
    addresses = list(await client.nthreads())
    asked = {
        asyncio.ensure_future(client.run(_holds, group, workers=[each], on_error="ignore")): each
        for each in addresses
    }
    if not asked:
        return [], []
    done, waiting = await asyncio.wait(asked, timeout=seconds)
    for each in waiting:
        each.cancel()
    # One that is gone has no answer, and holds nothing.
    holding = [asked[each] for each in done if any(each.result().values())]
    return sorted(holding), sorted(asked[each] for each in waiting)


def _are_contained(client: distributed.Client, addresses: Iterable[str]) -> bool:
    """Whether these Dask workers, as far as they live, are processes of this one's session."""
    alive = client.nthreads()
    there = [address for address in addresses if address in alive]
    return set(client.run(_session, workers=there).values()) <= {_session()}


def _session() -> tuple[str, int]:
    """The operating system's session of this process, and the machine."""
    return here().boot, os.getsid(0)


def _holds(group: str, dask_worker: distributed.Worker) -> bool:
    """Whether an actor or a training function of a group is on a Dask worker."""
    return any(f"-{group}-" in str(key) for key in dask_worker.state.tasks)


class SchedulerWatch:
    """Watches the connection of a client to its scheduler, in a thread of its own.

    It begins before there is a parameter server, for that may wait for a scheduler that is lost.

    Parameters
    ----------
    told
        Called with what has happened, in that thread, when the scheduler is lost.
    """

    def __init__(self, client: distributed.Client, told: Callable[[str], None]) -> None:
        self._connection = SchedulerConnection(client)
        self._address = client.scheduler.address
        self._told = told
        self._server: ParameterServer | None = None
        self._over = False
        self._found = ""
        threading.Thread(target=self._look, daemon=True, name="dps-scheduler-watch").start()

    @property
    def lost(self) -> str:
        """What has happened, if the scheduler was lost before the parameter server was closed."""
        if not self._found:
            server = self._server
            if self._connection.lost if server is None else server.scheduler_lost:
                self._found = f"the connection to Dask's scheduler at {self._address} broke"
        return self._found

    def is_up(self, server: ParameterServer) -> None:
        """Take note of the parameter server, with which it ends."""
        self._server = server

    def end(self) -> None:
        """Look no more, as nothing came up: perhaps because of a loss that shows in a moment."""
        until = time.monotonic() + MOMENT_SECONDS
        while not self.lost and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        self._over = True

    def _look(self) -> None:
        while not self._over and (self._server is None or not self._server.closed):
            if lost := self.lost:
                self._told(lost)
                return
            time.sleep(LOOK_SECONDS)
