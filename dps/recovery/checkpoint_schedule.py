"""When a shard's state is written to files, so that the promise of checkpoints is kept.

The promise is an interval, in updates or in seconds: whatever is acked beyond the last complete
checkpoint stays within it. A write starts early enough to be done in time, with a reference to the
state, so that updates go on meanwhile; when it is not done in time, acks wait for it. An interval
that is not given is chosen anew after each write (`dps.core.checkpoint_interval`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, Protocol, TypeVar

from dps.core.checkpoint_interval import AutoInterval, WriteCosts
from dps.core.shard import ShardState
from dps.errors import CheckpointCorrupt, ConfigurationError, StaleEpoch, StoreUnavailable
from dps.events import CheckpointFailed, CheckpointRefused, CheckpointWritten, IntervalChosen
from dps.recovery.checkpoint_files import CheckpointFiles, Found
from dps.recovery.durability import CutPersistence, ServerContext

T = TypeVar("T")

RETRY_SECONDS = 0.05
TICK_SECONDS = 0.001  # clocks may differ by less than the time can advance
SLOW_SECONDS = 30.0  # a write that takes longer is recorded as failed while it goes on
FILE_THREADS = 2  # of each shard: a write that hangs does not keep the next epoch's waiting


class CheckpointSettings(Protocol):
    """What a checkpointing durability is asked for."""

    @property
    def every(self) -> int | Literal["auto"] | None:
        """At most how many acked updates are at risk; None: any number; "auto": as is best."""
        ...

    @property
    def mode(self) -> Literal["sync", "async"]:
        """Whether acks wait for every write that is due."""
        ...

    @property
    def path(self) -> str | None:
        """Where the files go."""
        ...

    @property
    def keep(self) -> int:
        """How many checkpoints are kept."""
        ...

    @property
    def seconds(self) -> float | None:
        """Within how many seconds an acked update is saved; None: any time."""
        ...

    @property
    def least(self) -> int:
        """The shortest interval that is chosen, in updates."""
        ...

    @property
    def most(self) -> int:
        """The longest one."""
        ...

    @property
    def mtbf(self) -> float | None:
        """The mean time between failures of a shard in seconds, as far as it is known."""
        ...


class Checkpoints:
    """A shard's durability in files (see `dps.recovery.checkpoint.Checkpoint`)."""

    source = "checkpoint"
    immediate = False
    window = 64
    cuts: CutPersistence | None = None
    _save_attempts = 1  # the disk does not change its mind at once
    _retry_seconds = RETRY_SECONDS

    def __init__(self, wanted: CheckpointSettings, context: ServerContext) -> None:
        if wanted.path is None:
            raise ConfigurationError("checkpoint: no path was given")
        self._shard = context.shard
        self._wanted = wanted
        self._clock = context.clock
        self._emit = context.emit
        self._tasks = context.tasks
        # A folder for each group: epochs start anew, and another run's must not be taken for ours.
        self._files = self._files_in(f"{wanted.path.rstrip('/')}/{context.name}", context)
        # Not the event loop's own threads, which apply updates: files may hang for ever.
        self._threads = ThreadPoolExecutor(FILE_THREADS, "dps-files")
        self._complete = 0
        self._writing: asyncio.Task[None] | None = None
        self._timer: asyncio.Task[None] | None = None
        self._latest: tuple[int, ShardState] | None = None
        self._newest = 0  # the newest version that is acked, or about to be
        self._unsaved = asyncio.Event()
        self._since = 0.0  # whatever is acked and not saved was acked after this moment
        self._failure = ""  # why the last write failed
        self._failed_at = -math.inf
        self._refused = 0  # up to this epoch, the files belong to a server that came later
        self._sync = sync = wanted.mode == "sync"
        self._due, self._allowed = math.inf, math.inf
        self._costs = WriteCosts()
        self._history = context.history
        self._auto: AutoInterval | None = None
        if isinstance(wanted.every, str):
            self._auto = AutoInterval(wanted.least, wanted.most, wanted.mtbf, not sync)
        self._every = wanted.least if isinstance(wanted.every, str) else wanted.every
        self._promise(self._every)
        seconds = math.inf if wanted.seconds is None else wanted.seconds
        self._due_after = seconds / 2
        self._allowed_for = seconds / 2 if sync else seconds

    def _files_in(self, path: str, context: ServerContext) -> CheckpointFiles:
        return CheckpointFiles(path, context.shard, self._wanted.keep)

    @property
    def saved(self) -> int:
        """The version of the newest checkpoint that is known to be complete."""
        return self._complete

    def take_over(self, saved: int, version: int) -> None:
        """Go on where the keeper of another replica is, which has a state of this version.

        It is not known here since when what is not saved has been acked. With a promise in seconds
        nothing more is acked before a write, and a new tail therefore begins with one
        (`dps.protocol.coordinator.shard_controller`).
        """
        self._complete, self._newest = saved, version
        if self._wanted.seconds is not None:
            self._since = self._clock.monotonic() - self._allowed_for

    def enter(self, epoch: int, state: ShardState | None) -> None:
        """Do nothing: whoever commits begins with a write, or is told what is saved."""

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Write the state that the server starts with, so that there always is a checkpoint."""
        await self._publish(epoch, state, self._clock.monotonic())

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Start a write when one is due; wait for it only where the promise asks for it."""
        self._must_not_be_refused(epoch)
        self._note(epoch, state)
        if self._costs.came(self._clock.monotonic(), state.version):
            self._choose(epoch)
        self._start_timer()
        if state.version - self._complete >= self._due:
            self._start_writing(epoch, state)
        while self._too_much_at_risk(state):
            self._must_not_be_refused(epoch)
            before = self._complete
            await asyncio.shield(self._start_writing(epoch, state))
            if self._complete == before:
                raise StoreUnavailable(
                    f"shard {self._shard}: checkpoints cannot be written ({self._failure})"
                )

    async def save(self, epoch: int, state: ShardState) -> None:
        """Return when a checkpoint holds a state that was committed.

        Raises
        ------
        StoreUnavailable
            It cannot be written; the one before it is still there.
        """
        attempts = 0
        while self._complete < state.version:
            self._must_not_be_refused(epoch)
            before = self._complete
            await asyncio.shield(self._start_writing(epoch, state))
            if self._complete == before and (attempts := attempts + 1) >= self._save_attempts:
                raise StoreUnavailable(
                    f"shard {self._shard}: version {state.version} cannot be written to "
                    f"{self._wanted.path} ({self._failure}); version {before} is there"
                )

    async def restore(self, epoch: int, cut: int) -> ShardState:
        """Return the newest checkpoint that is whole, recording those that are not."""
        for found in await self._in_thread(self._files.found):
            try:
                state = await self._in_thread(partial(self._files.read, found))
                await self._tell_of(epoch, found)
                return state
            except CheckpointCorrupt as error:
                self._emit(
                    CheckpointRefused(self._clock.now(), self._shard, found.manifest, str(error))
                )
        raise StoreUnavailable(f"shard {self._shard}: no whole checkpoint in {self._wanted.path}")

    async def _tell_of(self, epoch: int, found: Found) -> None:
        """Record what is to be known of a checkpoint that was read, besides its version."""

    async def close(self) -> None:
        """Start no further write."""
        if self._timer is not None:
            self._timer.cancel()

    def _must_not_be_refused(self, epoch: int) -> None:
        if epoch <= self._refused:
            raise StaleEpoch(f"shard {self._shard}: epoch {epoch} is over")

    def _promise(self, every: int | None) -> None:
        """Have no more than `every` updates at risk from now on."""
        if every is not None:
            # Half the interval is for the updates that come while a write is under way.
            self._due = every if self._sync else max(1, every // 2)
            self._allowed = every - 1 if self._sync else every

    def _choose(self, epoch: int) -> None:
        """Choose the interval by what is known now, if it is not given."""
        known = self._costs.estimate
        if self._auto is None or known is None:
            return
        chosen = self._auto.choose(known, self._history())
        if chosen.every != self._every:
            self._every = chosen.every
            self._promise(chosen.every)
            by = chosen.cost, chosen.rate, chosen.mtbf
            self._emit(IntervalChosen(self._clock.now(), self._shard, epoch, chosen.every, *by))

    def _note(self, epoch: int, state: ShardState) -> None:
        """Take note of a state that is about to be acked."""
        if self._newest <= self._complete:
            self._since = self._clock.monotonic()  # until now nothing was at risk
        self._latest, self._newest = (epoch, state), state.version
        if state.version > self._complete:
            self._unsaved.set()

    def _too_much_at_risk(self, state: ShardState) -> bool:
        unsaved = state.version - self._complete
        age = self._clock.monotonic() - self._since
        return unsaved > self._allowed or (unsaved > 0 and age >= self._allowed_for)

    def _start_timer(self) -> None:
        """Have what is unsaved written in time, if that is promised.

        The timer may have ended, when a server that came later had the files for a while.
        """
        if self._wanted.seconds is not None and (self._timer is None or self._timer.done()):
            self._timer = self._tasks.start(self._write_in_time())

    async def _write_in_time(self) -> None:
        """Start a write in time for what is unsaved, though no further update may follow."""
        while True:
            await self._unsaved.wait()
            left = self._since + self._due_after - self._clock.monotonic()
            if left > 0:
                await asyncio.sleep(max(left, TICK_SECONDS))
            elif not await self._write_latest():
                return

    async def _write_latest(self) -> bool:
        """Write what was noted last, pause if that fails; False: a later epoch has the files."""
        assert self._latest is not None
        epoch, state = self._latest
        if epoch <= self._refused:
            return False
        before = self._complete
        await asyncio.shield(self._start_writing(epoch, state))
        if self._complete == before:
            await self._pause()
        return True

    async def _pause(self) -> None:
        """Wait until a write may be tried again after one that failed, whoever started it."""
        while (left := self._failed_at + self._retry_seconds - self._clock.monotonic()) > 0:
            await asyncio.sleep(max(left, TICK_SECONDS))

    def _start_writing(self, epoch: int, state: ShardState) -> asyncio.Task[None]:
        if self._writing is None or self._writing.done():
            noted = self._clock.monotonic()
            self._costs.begins(noted)
            self._writing = self._tasks.start(self._measured(epoch, state, noted))
        return self._writing

    async def _measured(self, epoch: int, state: ShardState, noted: float) -> None:
        """Try to write a state, and take note of when that has ended."""
        before = self._complete
        await self._try_to_publish(epoch, state, noted)
        if self._complete > before:
            self._costs.ends(self._clock.monotonic())
        else:
            self._costs.fails()

    async def _try_to_publish(self, epoch: int, state: ShardState, noted: float) -> None:
        try:
            await self._publish(epoch, state, noted)
        except MemoryError as error:  # it may be there for the next write
            self._failed(epoch, f"there is no memory to write it: {error}")
        except (StoreUnavailable, StaleEpoch) as error:
            if isinstance(error, StaleEpoch):
                self._refused = epoch
            self._failed(epoch, str(error))

    def _failed(self, epoch: int, reason: str) -> None:
        self._failure, self._failed_at = reason, self._clock.monotonic()
        self._emit(CheckpointFailed(self._clock.now(), self._shard, epoch, reason))

    async def _publish(self, epoch: int, state: ShardState, noted: float) -> None:
        """Write a state that held all that was acked up to the moment `noted`."""
        await self._write(epoch, state)
        self._saved(state.version, noted)

    async def _write(self, epoch: int, state: ShardState, cut: int | None = None) -> None:
        began = self._clock.monotonic()
        loop = asyncio.get_running_loop()
        slow = loop.call_later(SLOW_SECONDS, self._tell_of_slow_write, epoch, state.version)
        try:
            nbytes = await self._in_thread(partial(self._files.write, epoch, state, cut))
        finally:
            slow.cancel()
        now, took = self._clock.now(), self._clock.monotonic() - began
        self._emit(CheckpointWritten(now, self._shard, epoch, state.version, nbytes, took))

    def _tell_of_slow_write(self, epoch: int, version: int) -> None:
        reason = f"version {version} is not written after {SLOW_SECONDS:g} s; the write goes on"
        self._emit(CheckpointFailed(self._clock.now(), self._shard, epoch, reason))

    def _saved(self, version: int, noted: float) -> None:
        self._complete = version
        self._since = noted  # what is unsaved now came while the write was under way
        if self._latest is not None and self._latest[1].version <= version:
            self._unsaved.clear()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Do work with files, which may block, without stopping the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
