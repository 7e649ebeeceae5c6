"""Checkpoints: shard state is written to files, for each shard separately or for all together.

- Written: the state, early enough to keep the promise; acks wait only if a write is late.
- Restored: the lost shard from its newest whole checkpoint (`scope="shard"`), or all shards from
  their newest consistent cut (`scope="all"`).
- Promised: at most `every` acked updates, or those of `seconds`, are lost.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, ParamSpec, TypeVar

from dps.core.arguments import Path
from dps.core.checkpoint_interval import AutoInterval, WriteCosts
from dps.core.ranges import Checked, Positive, integer_argument, whole_from
from dps.core.shard import ShardState
from dps.errors import (
    CheckpointCorrupt,
    ConfigurationError,
    DpsError,
    StaleEpoch,
    StoreUnavailable,
    require,
)
from dps.events import CheckpointFailed, CheckpointRefused, CheckpointWritten, IntervalChosen
from dps.protocol.messages import WantCut
from dps.protocol.wire import message
from dps.recovery.checkpoint_files import CheckpointFiles, Published
from dps.recovery.durability import Durability, Feature, Persistence, ServerContext

T = TypeVar("T")
P = ParamSpec("P")

CHECKPOINT_EVERY = 100

# The default limits of the interval with `every="auto"`.
LEAST = 10
MOST = 10_000

# Why features that change one shard alone are not supported if all are restored together.
_REFUSALS: dict[Feature, str] = {
    "buffered gradients": (
        "checkpoint with scope='all' cannot be combined with outage=continue: gradients buffered "
        "for the lost shard would be applied to its cut, but not to the other shards; use "
        "outage=wait, or scope='shard'"
    ),
    "functions": (
        "checkpoint with scope='all' cannot be combined with functions: a cut could contain a "
        "call on some of the shards; use scope='shard'"
    ),
    "moves": (
        "Checkpoint(scope='all') restores all shards together, so they cannot move; use "
        "scope='shard' or another durability to choose or change the number of servers"
    ),
}


@message
@dataclass(frozen=True, slots=True)
class Checkpoint(Durability):
    """Shard state is written to files; a lost shard restarts from the last complete one.

    Parameters
    ----------
    every
        The promise, in updates: no more than `every` acked updates are ever at risk. If this
        and `seconds` are not given, it is 100. "auto" chooses the interval again after each write,
        from the cost of writes and the rate of failures (`dps.core.checkpoint_interval`); the
        promise then is `most` updates.
    mode
        "sync": acks wait for every write that is due. "async": a write starts after half of
        the interval, and acks wait only if the promise would be broken.
    path
        Any fsspec path that all server nodes can reach. None: in `dps run`, a folder of the trial.
    keep
        How many checkpoints of each shard to keep.
    seconds
        The promise, in time: an acked update is saved within `seconds`, by a timer if no other
        update follows. While the path cannot be written to, acks stop when the oldest unsaved
        update reaches this age.
    scope
        What is restored when a shard is lost: that "shard", or "all" of them from the newest
        consistent cut, in which all shards hold the same updates. The promise then counts from that
        cut.
    least, most
        With `every="auto"`, the shortest and the longest interval that is chosen, in updates.
    mtbf
        With `every="auto"`, the mean time between failures of a shard in seconds, if it is known.
        It counts as much as one observed failure.

    Examples
    --------
    >>> Recovery(Checkpoint(every=50, path="s3://bucket/runs")).path
    's3://bucket/runs'
    """

    every: int | Literal["auto"] | None = None
    mode: Literal["sync", "async"] = "async"
    path: Path | None = None
    keep: Annotated[int, whole_from(1, "checkpoints")] = 2
    seconds: Positive | None = None
    scope: Literal["shard", "all"] = "shard"
    least: Annotated[int, whole_from(1, "updates")] = LEAST
    most: int = MOST
    mtbf: Positive | None = None
    writes_checkpoints = True

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        every, most, least = self.every, self.most, self.least
        if every is None and self.seconds is None:
            every = CHECKPOINT_EVERY
        elif not (every is None or (isinstance(every, str) and every == "auto")):
            every = integer_argument("Checkpoint: every", every, 1, "updates, or 'auto'")
        object.__setattr__(self, "every", every)
        most = integer_argument("Checkpoint: most", most, least, f"updates, as least={least}")
        object.__setattr__(self, "most", most)
        fits = every == "auto" or (least, most, self.mtbf) == (LEAST, MOST, None)
        require(fits, "Checkpoint: least, most and mtbf need every='auto'")

    @property
    def at_risk(self) -> int | None:
        """The largest number of acked updates ever at risk; None: unlimited."""
        return self.most if isinstance(self.every, str) else self.every

    def refusal(self, feature: Feature) -> str | None:
        """Return why a feature is not supported if all shards are restored together."""
        return _REFUSALS.get(feature) if self.scope == "all" else None

    def persistence(self, context: ServerContext) -> Persistence:
        """Return the writer of one shard's checkpoints."""
        return (CutPersistence if self.scope == "all" else CheckpointPersistence)(self, context)


# -- writing them, and reading them back -------------------------------------------------------

RETRY_SECONDS = 0.05
TICK_SECONDS = 0.001  # a shorter sleep may not advance the clock
SLOW_SECONDS = 30.0  # a longer write is recorded as failed, but continues
FILE_THREADS = 2  # of each shard: a hanging write does not block the next epoch's
FIRST = 0  # the number of the cut of a group's first states


class CheckpointPersistence(Persistence):
    """Writes one shard's checkpoints so that the promise of a `Checkpoint` is kept.

    The updates beyond the last complete checkpoint stay within the interval. A write starts early
    enough to finish in time. It uses a reference to the state, so updates continue; if it
    is late, acks wait for it. Used from one event loop.
    """

    source = "checkpoint"
    immediate = False
    _save_attempts = 1  # no immediate retry on a disk that refused a write
    _retry_seconds = RETRY_SECONDS

    def __init__(
        self,
        wanted: Checkpoint,
        context: ServerContext,
        files: Callable[[str, int, int], CheckpointFiles] = CheckpointFiles,
    ) -> None:
        if wanted.path is None:
            raise ConfigurationError("checkpoint needs a path")
        self._shard, self._wanted = context.shard, wanted
        self._clock, self._emit, self._tasks = context.clock, context.emit, context.tasks
        # A folder for each group: epochs start again at 1, and would mix with those of other runs.
        folder = f"{wanted.path.rstrip('/')}/{context.name}"
        self._files = files(folder, context.shard, wanted.keep)
        # Not the event loop's own threads, which apply updates: file access may hang for ever.
        self._threads = ThreadPoolExecutor(FILE_THREADS, "dps-files")
        self._complete, self._complete_in = 0, 0  # the version, and the epoch it was written in
        self._writing: asyncio.Task[None] | None = None
        self._writing_in = 0
        self._timer: asyncio.Task[None] | None = None
        self._latest: tuple[int, ShardState] | None = None
        self._newest = 0  # the newest version that is acked, or about to be
        self._unsaved = asyncio.Event()
        self._since = 0.0  # every unsaved acked update was acked after this moment
        self._failure = ""  # why the last write failed
        self._failed_at = -math.inf
        self._refused = 0  # a later server has the files: epochs up to this one must not write
        self._sync = wanted.mode == "sync"
        self._due, self._allowed = math.inf, math.inf
        self._costs = WriteCosts()
        self._context = context
        self._auto: AutoInterval | None = None
        if isinstance(wanted.every, str):
            self._auto = AutoInterval(wanted.least, wanted.most, wanted.mtbf, not self._sync)
        self._every = wanted.least if isinstance(wanted.every, str) else wanted.every
        self._promise(self._every)
        seconds = wanted.seconds or math.inf
        self._due_after = seconds / 2
        self._allowed_for = seconds / 2 if self._sync else seconds

    @property
    def saved(self) -> int:
        """The version of the newest checkpoint that is known to be complete."""
        return self._complete

    def take_over(self, saved: int, version: int) -> None:
        """Continue for a replica that had saved version `saved` and sent its state of `version`."""
        # This replica does not know when unsaved updates were acked. With a promise in seconds, a
        # new tail therefore begins with a write (`dps.protocol.coordinator.shard_controller`).
        self._complete, self._newest = saved, version
        if self._wanted.seconds is not None:
            self._since = self._clock.monotonic() - self._allowed_for

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Write the state that the server starts with, so that there always is a checkpoint."""
        # A later state of this epoch may have been written already, if the request is repeated.
        while self._complete_in < epoch or self._complete < state.version:
            await self._must_write(epoch, state)

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Start a write if one is due; wait for it only if the promise requires that."""
        self._must_not_be_refused(epoch)
        self._note(epoch, state)
        if self._costs.came(self._clock.monotonic(), state.version):
            self._choose(epoch)
        self._start_timer()
        if state.version - self._complete >= self._due:
            self._start_writing(epoch, state)
        while self._too_much_at_risk(state):
            await self._must_write(epoch, state)

    async def save(self, epoch: int, state: ShardState) -> None:
        """Return when a checkpoint holds a committed state; after an error, the last one stays."""
        attempts = 0
        while self._complete < state.version:
            attempts += not await self._has_written(epoch, state)
            if attempts >= self._save_attempts:
                raise StoreUnavailable(
                    f"shard {self._shard}: version {state.version} cannot be written to "
                    f"{self._wanted.path} ({self._failure}); version {self._complete} is there"
                )

    async def restore(self, epoch: int, cut: int) -> ShardState:
        """Return the state of the newest whole checkpoint; record damaged ones."""
        for checkpoint in await self._in_thread(self._files.published):
            if (state := await self._read(epoch, checkpoint)) is not None:
                return state
        raise StoreUnavailable(
            f"shard {self._shard}: no complete checkpoint in {self._wanted.path}"
        )

    async def _read(self, epoch: int, checkpoint: Published) -> ShardState | None:
        """Return a checkpoint's state; None if it is damaged, which is recorded."""
        try:
            return await self._in_thread(self._files.read, checkpoint)
        except CheckpointCorrupt as error:
            now = self._clock.now()
            self._emit(CheckpointRefused(now, self._shard, checkpoint.manifest, str(error)))
            return None

    async def close(self) -> None:
        """Start no further write."""
        if self._timer is not None:
            self._timer.cancel()

    def _must_not_be_refused(self, epoch: int) -> None:
        if epoch <= self._refused:
            raise StaleEpoch(f"shard {self._shard}: epoch {epoch} is over")

    # -- the promise -----------------------------------------------------------------------------

    def _promise(self, every: int | None) -> None:
        if every is not None:
            # The other half of the interval is for the updates that arrive during a write.
            self._due = every if self._sync else max(1, every // 2)
            self._allowed = every - 1 if self._sync else every

    def _choose(self, epoch: int) -> None:
        known = self._costs.estimate
        if self._auto is None or known is None:
            return
        every, mtbf = self._auto.choose(known, self._context.history())
        if every != self._every:
            self._every = every
            self._promise(every)
            by = known.cost, known.rate, mtbf
            self._emit(IntervalChosen(self._clock.now(), self._shard, epoch, every, *by))

    def _note(self, epoch: int, state: ShardState) -> None:
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
        # The timer ends while a later server has the files.
        if self._wanted.seconds is not None and (self._timer is None or self._timer.done()):
            self._timer = self._tasks.start(self._write_in_time())

    async def _write_in_time(self) -> None:
        """Start writes of unsaved updates in time, also if no update follows."""
        while True:
            await self._unsaved.wait()
            left = self._since + self._due_after - self._clock.monotonic()
            if left > 0:
                await asyncio.sleep(max(left, TICK_SECONDS))
            elif not await self._write_latest():
                return

    async def _write_latest(self) -> bool:
        """Write the latest state, pause if that fails; False if a later server has the files."""
        assert self._latest is not None
        epoch, state = self._latest
        if epoch <= self._refused:
            return False
        if not await self._has_written(epoch, state):
            # Another task may have started the write that failed.
            while (left := self._failed_at + self._retry_seconds - self._clock.monotonic()) > 0:
                await asyncio.sleep(max(left, TICK_SECONDS))
        return True

    # -- writing ---------------------------------------------------------------------------------

    async def _must_write(self, epoch: int, state: ShardState) -> None:
        if not await self._has_written(epoch, state):
            self._must_not_be_refused(epoch)
            why = f"checkpoints cannot be written ({self._failure})"
            raise StoreUnavailable(f"shard {self._shard}: {why}")

    async def _has_written(self, epoch: int, state: ShardState) -> bool:
        """Wait for the write that is under way, or for one of this state; return whether it worked.

        Raises `StaleEpoch` if a server of a later epoch has the files.
        """
        self._must_not_be_refused(epoch)
        before = self._complete, self._complete_in
        await asyncio.shield(self._start_writing(epoch, state))
        return (self._complete, self._complete_in) != before

    def _start_writing(self, epoch: int, state: ShardState) -> asyncio.Task[None]:
        """Start a write, unless one of this epoch is under way: states are written in order."""
        if self._writing is None or self._writing.done() or self._writing_in < epoch:
            now, self._writing_in = self._clock.monotonic(), epoch
            self._costs.begins(now)
            noted = now if state.version >= self._newest else self._since
            self._writing = self._tasks.start(self._try_to_publish(epoch, state, noted))
        return self._writing

    async def _try_to_publish(self, epoch: int, state: ShardState, noted: float) -> None:
        try:
            await self._publish(epoch, state, noted)
        # There may be memory for the next write.
        except (MemoryError, StoreUnavailable, StaleEpoch) as error:
            self._costs.fails()
            if isinstance(error, StaleEpoch):
                self._refused = max(self._refused, epoch)
            self._failed(epoch, str(error) or "not enough memory to write it")
        else:
            self._costs.ends(self._clock.monotonic())

    def _failed(self, epoch: int, reason: str) -> None:
        self._failure, self._failed_at = reason, self._clock.monotonic()
        self._emit(CheckpointFailed(self._clock.now(), self._shard, epoch, reason))

    async def _publish(self, epoch: int, state: ShardState, noted: float) -> None:
        """Write a state that holds every update acked until the monotonic time `noted`."""
        await self._write(epoch, state)
        if epoch >= self._complete_in:
            self._complete_in = epoch
            self._saved(state.version, noted)

    async def _write(self, epoch: int, state: ShardState, cut: int | None = None) -> None:
        def record_slow_write() -> None:
            after = f"is not written after {SLOW_SECONDS:g} s; the write continues"
            reason = f"version {state.version} {after}"
            self._emit(CheckpointFailed(self._clock.now(), self._shard, epoch, reason))

        began = self._clock.monotonic()
        slow = asyncio.get_running_loop().call_later(SLOW_SECONDS, record_slow_write)
        try:
            nbytes = await self._in_thread(self._files.write, epoch, state, cut)
        finally:
            slow.cancel()
        now, took = self._clock.now(), self._clock.monotonic() - began
        self._emit(CheckpointWritten(now, self._shard, epoch, state.version, nbytes, took))

    def _saved(self, version: int, noted: float) -> None:
        self._complete = version
        self._since = noted  # updates that are unsaved now were acked during the write
        if self._latest is not None and self._latest[1].version <= version:
            self._unsaved.clear()

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *args, **kwargs))


class CutPersistence(CheckpointPersistence):
    """Writes one shard's checkpoints if all shards are restored together (`scope="all"`)."""

    window = 1 << 30  # a cut may need any update that is under way; each worker has only one
    _save_attempts = 10  # shards may be too busy for a cut, or change their servers

    def __init__(self, wanted: Checkpoint, context: ServerContext) -> None:
        super().__init__(wanted, context)
        self._begun = False
        self._taken: dict[int, tuple[int, float]] = {}
        self._ended = asyncio.Condition()

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Write the first state of the shard, once; a restored one is in its cut already."""
        if self._begun:
            return
        there = await self._in_thread(self._files.published)
        if not any((checkpoint.epoch, checkpoint.cut) == (epoch, FIRST) for checkpoint in there):
            await self._write(epoch, state, FIRST)
            self._saved(state.version, self._clock.monotonic())
        self._begun = True

    async def restore(self, epoch: int, cut: int) -> ShardState:
        """Return the shard's state in a cut; if it is damaged, all shards use an earlier cut."""
        for checkpoint in await self._in_thread(self._files.published):
            state = await self._read(epoch, checkpoint) if checkpoint.cut == cut else None
            if state is not None:
                self._begun = True
                self._saved(state.version, self._clock.monotonic())
                return state
        raise CheckpointCorrupt(f"shard {self._shard}: no complete checkpoint of cut {cut}")

    async def write_cut(self, epoch: int, cut: int, state: ShardState) -> None:
        """Write the shard's state in a cut."""
        noted = self._clock.monotonic()
        try:
            await self._write(epoch, state, cut)
        except DpsError as error:
            self._failed(epoch, str(error))
            raise
        self._taken[cut] = (state.version, noted)

    async def end_cut(self, epoch: int, cut: int, oldest: int) -> None:
        """Note that a cut is complete on all shards, and remove cuts before `oldest`."""
        taken = self._taken.pop(cut, None)
        if taken is not None and taken[0] > self._complete:
            self._saved(*taken)
        self._taken = {other: at for other, at in self._taken.items() if other > cut}
        async with self._ended:
            self._ended.notify_all()
        await self._in_thread(self._files.prune_cuts, epoch, oldest)

    async def _publish(self, epoch: int, state: ShardState, noted: float) -> None:
        """Request a cut that holds the state, and wait until it is complete on all shards."""
        context, timings = self._context, self._context.timings
        try:
            request = WantCut(self._shard, epoch, state.version)
            await context.transport.call(context.coordinator, request, timings.call)
            async with asyncio.timeout(timings.hold), self._ended:
                await self._ended.wait_for(lambda: self._complete >= state.version)
        except TimeoutError:
            raise StoreUnavailable("no cut was completed in time") from None
        except DpsError as error:
            raise StoreUnavailable(str(error)) from error
