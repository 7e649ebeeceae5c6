"""The session of a supervised program: parameter servers that resume from their checkpoints."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.comm import CommClosedError

from dps.cluster.driver.group_driver import SchedulerConnection
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.driver.setup import Options, check_client, checked_recovery
from dps.cluster.platform import platform_of
from dps.cluster.supervision.messages import ClusterLost, Finished, Past, Raised, Serving
from dps.cluster.transport.memory import machine
from dps.core.shard import Progress, ShardState
from dps.errors import CapacityError, ConfigurationError, DeadlineExceeded, SchedulerLost
from dps.events import Returned
from dps.protocol.timings import Timings

if TYPE_CHECKING:
    import distributed

LOOK_SECONDS = 0.05
MOMENT_SECONDS = 0.5
REPORT_SECONDS = 0.25

# Raised by modules of `CONNECTING` if there is no cluster, or its scheduler dies as it starts.
DASK_ERRORS = (ConnectionError, TimeoutError, EOFError, CommClosedError)
NO_CLUSTER = (*DASK_ERRORS, CapacityError, SchedulerLost)
CONNECTING = ("distributed.", "dps.cluster.")
NOTHING = Progress(0, 0, 0, 0, active=False)  # the progress of a worker that a shard does not know

# The choices that `ParameterServer.resume` takes; the others are in the checkpoints.
_NOT_SAVED = [field.name for field in fields(Options)]


class Session:
    """One incarnation of a supervised program, as the program sees it.

    Attributes
    ----------
    returns
        How often the program was restarted: 0 at first.
    cause
        Why the previous incarnation ended; "" at first.
    """

    def __init__(self, link: Connection, past: Past) -> None:
        self.returns = past.returns
        self.cause = past.cause
        self._past = past
        self._link = link
        self._sending = threading.Lock()
        self._calls = 0
        self._watches: list[SchedulerWatch] = []
        self._is_up = False  # whether a parameter server is or was up

    def parameter_server(
        self, client: distributed.Client, params: Mapping[str, np.ndarray], **choices: Any
    ) -> ParameterServer:
        """Start a parameter server, or resume it from its checkpoints after a return.

        The first call resumes what the first call of an earlier incarnation started, and so on. A
        resuming call waits until no Dask worker has any of the earlier hosts, and until every lease
        that they may have is over.

        The Dask client must be synchronous; `params` and `choices` are as for `ParameterServer`.
        The recovery must write checkpoints of whole shards. After a return, parameters, optimizer,
        recovery and so on are those of the checkpoints, as for `ParameterServer.resume`.

        Raises
        ------
        ConfigurationError
            The client is asynchronous, or the recovery writes no checkpoints, or restores in parts.
        StoreUnavailable
            The checkpoints of a parameter server that was up cannot be read.
        DeadlineExceeded
            Hosts of the earlier incarnation did not end, or a Dask worker does not report whether
            it has any.
        """
        check_client(client)
        if client.asynchronous:
            raise ConfigurationError("a supervised program needs a synchronous Dask client")
        recovery = checked_recovery(choices.get("recovery", "none"), platform_of(client))
        durability = recovery.durability
        if not durability.writes_checkpoints:
            raise ConfigurationError(
                f"a supervised program resumes from checkpoints, but {durability!r} writes none: "
                "use recovery=Recovery(Checkpoint(path=...))"
            )
        if durability.restores_in_parts:
            raise ConfigurationError(
                f"{durability!r} restores blocks of different age and cannot count lost updates, "
                "which a supervised program reports: use recovery=Recovery(Checkpoint(path=...))"
            )
        call, self._calls = self._calls, self._calls + 1
        watch = SchedulerWatch(client, lambda cause: self._send(ClusterLost(cause)))
        self._watches.append(watch)
        known = self._past.known.get(call)
        with ExitStack() as failing:
            failing.callback(watch.end)
            if known is None:
                ps = ParameterServer(client, params, **choices)
            else:
                self._settle(client, known, choices.get("timings", Timings()))
                kept = {name: choices[name] for name in _NOT_SAVED if name in choices}
                ps = ParameterServer.resume(client, known.folder, **kept)
            failing.callback(ps.close, checkpoint=False)
            ps.checkpoint()  # some durabilities would write the first one later
            failing.pop_all()
        returned: Returned | None = None
        if self.returns:
            states = ps.saved.states if ps.saved is not None else ()
            versions = tuple(state.version for state in states)
            lost = _lost(states, known.versions if known is not None else ())
            seconds = time.monotonic() - self._past.noticed
            returned = Returned(time.time(), self.cause, self.returns, seconds, versions, lost)
            if (sink := choices.get("on_event")) is not None:
                client.loop.add_callback(sink, returned)
        self._send(Serving(call, _folder(ps), returned=returned))
        watch.is_up(ps)
        self._is_up = True
        threading.Thread(target=self._report, args=(call, ps, client), daemon=True).start()
        return ps

    def finish(self, message: Finished | Raised) -> None:
        """Report that the program has returned or raised, or that it has lost its cluster."""
        cause, error = "", message.error if isinstance(message, Raised) else None
        if error is not None:
            cause = next((watch.lost for watch in self._watches if watch.lost), "")
            if not cause and self.returns and not self._is_up and _is_no_cluster(error):
                # A scheduler that the program does not start may be restarting.
                cause = f"the program found no cluster ({type(error).__name__}: {error})"
        try:
            ForkingPickler.loads(ForkingPickler.dumps(message))
        except Exception:  # noqa: BLE001 (an object of the program may raise anything)
            trace = message.trace if isinstance(message, Raised) else traceback.format_exc()
            message = Raised(None, trace)
        if cause and isinstance(message, Raised):
            self._send(ClusterLost(cause, message))
        else:
            self._send(message)

    def _settle(self, client: distributed.Client, known: Serving, timings: Timings) -> None:
        """Wait until the earlier incarnation can no longer acknowledge or write."""
        group = known.folder.rpartition("/")[2]
        until = time.monotonic() + timings.unavailable
        while True:
            left = max(LOOK_SECONDS, until - time.monotonic())
            answers = client.sync(_holders, client, group, left)
            silent = [address for address, holds in answers.items() if holds is None]
            if not silent and not any(answers.values()):
                break
            if silent or time.monotonic() > until:
                named = f"do not answer: {', '.join(silent)}" if silent else "host it"
                raise DeadlineExceeded(
                    f"the earlier incarnation of parameter server {group} may still run: after "
                    f"{timings.unavailable:g} s Dask workers {named}; end or restart these"
                )
            time.sleep(LOOK_SECONDS)
        if not known.contained:  # an unreachable host may still have its lease
            time.sleep(max(0.0, self._past.noticed + timings.lease - time.monotonic()))

    def _report(self, call: int, ps: ParameterServer, client: distributed.Client) -> None:
        """Report the progress of the shards, for a lower bound of the loss after a return."""
        nodes: set[str] = set()
        contained = True
        while not ps.closed and not ps.scheduler_lost:
            try:
                versions = tuple(s.version for s in ps.shards if s.version is not None)
                if new := {node.address for node in ps.nodes} - nodes:
                    nodes |= new
                    contained = contained and _are_contained(client, new)
            except Exception:
                if ps.closed or ps.scheduler_lost:  # during the request
                    return
                raise
            if len(versions) == len(ps.group.layout.shards):
                self._send(Serving(call, _folder(ps), versions, contained))
            time.sleep(REPORT_SECONDS)

    def _send(self, message: Any) -> None:
        with self._sending:
            self._link.send(message)


def _is_no_cluster(error: BaseException) -> bool:
    """Whether Dask or dps raised an error because it had no connection."""
    # Dask raises a plain OSError when an attempt to connect takes too long.
    if type(error) is not OSError and not isinstance(error, NO_CLUSTER):
        return False
    frames = walk_tb(error.__traceback__)
    modules = (f"{frame.f_globals.get('__name__', '')}." for frame, _ in frames)
    return any(m.startswith(CONNECTING) and not m.startswith(f"{__package__}.") for m in modules)


def _lost(states: Sequence[ShardState], seen: Sequence[int]) -> tuple[int, ...]:
    """Return a lower bound of each shard's lost updates; `seen` are the last known versions."""
    # Progress reports lag. But every update is sent to every shard, and an update that one shard
    # has is not computed again, so a shard has also lost those that only other shards have.
    workers = [each.workers for each in states]
    names = set[str]().union(*workers)
    lost = []
    for last, state, here in zip(seen or [0] * len(states), states, workers, strict=True):
        most = {
            n: max(_gap(here.get(n, NOTHING), w.get(n, NOTHING)) for w in workers) for n in names
        }
        lost.append(max(last - state.version, sum(most.values())))
    return tuple(lost)


def _gap(here: Progress, there: Progress) -> int:
    """Return how many updates of a worker are there and not here, not counting older gaps."""
    if here.incarnation > there.incarnation:
        return 0
    numbers = there.seq - (here.seq if here.incarnation == there.incarnation else 0)
    return max(0, min(numbers, there.applied - here.applied))


def _folder(ps: ParameterServer) -> str:
    return f"{str(ps.group.recovery.path).rstrip('/')}/{ps.name}"


async def _holders(
    client: distributed.Client, group: str, seconds: float
) -> dict[str, bool | None]:
    """Return whether each Dask worker has tasks of a group; None: it does not answer."""

    async def ask(address: str) -> bool | None:
        try:
            async with asyncio.timeout(seconds):
                answers = await client.run(_holds, group, workers=[address], on_error="ignore")
        except TimeoutError:
            return None
        return any(answers.values())  # one that is gone does not answer, and holds nothing

    addresses = sorted(await client.nthreads())
    return dict(zip(addresses, await asyncio.gather(*map(ask, addresses)), strict=True))


def _are_contained(client: distributed.Client, addresses: Iterable[str]) -> bool:
    """Whether all live ones of these Dask workers are processes of this process's session."""
    alive = client.nthreads()
    there = [address for address in addresses if address in alive]
    return set(client.run(_session, workers=there).values()) <= {_session()}


def _session() -> tuple[str, int]:
    return machine(), os.getsid(0)  # the operating system's session of this process


def _holds(group: str, dask_worker: distributed.Worker) -> bool:
    # Whether an actor or a training function of the group is there.
    return any(f"-{group}-" in str(key) for key in dask_worker.state.tasks)


class SchedulerWatch:
    """A thread that calls `on_loss` when the connection of a client to its scheduler is lost."""

    def __init__(self, client: distributed.Client, on_loss: Callable[[str], None]) -> None:
        self._connection = SchedulerConnection(client)
        self._text = f"the connection to Dask's scheduler at {client.scheduler.address} broke"
        self._on_loss = on_loss
        self._server: ParameterServer | None = None
        self._over = False
        self._lost = ""
        # Now, because the start of a parameter server may wait for a scheduler that is lost.
        threading.Thread(target=self._look, daemon=True, name="dps-scheduler-watch").start()

    @property
    def lost(self) -> str:
        """A text on the loss of the scheduler, if the parameter server was open; otherwise ""."""
        server = self._server
        if self._connection.lost if server is None else server.scheduler_lost:
            self._lost = self._text
        return self._lost

    def is_up(self, server: ParameterServer) -> None:
        """Watch until this parameter server is closed."""
        self._server = server

    def end(self) -> None:
        """Stop watching after a failed start, but give the loss a moment to show."""
        until = time.monotonic() + MOMENT_SECONDS
        while not self.lost and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        self._over = True

    def _look(self) -> None:
        while not self._over and (self._server is None or not self._server.closed):
            if lost := self.lost:
                self._on_loss(lost)
                return
            time.sleep(LOOK_SECONDS)
