"""What a training function is given: a `Worker` that pulls weights and pushes gradients.

The training function runs in a thread of a Dask node as one long task; the protocol's client runs
on the node's event loop, so a push goes on while the function computes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np

from dps.cluster.node.recorder import WorkerRecords
from dps.cluster.node.shutdown import Leave
from dps.cluster.platform import Platform
from dps.cluster.transport.memory import private
from dps.core.arguments import as_gradient, as_number, is_name
from dps.core.blocks import Arrays, Layout
from dps.core.consistency import Consistency
from dps.core.flat import FlatArrays, FlatLayout
from dps.core.ranges import real, refused, shown
from dps.core.tables.key_routing import Gradients
from dps.core.tables.row_gradients import KEYS
from dps.errors import DpsError, ShapeMismatch
from dps.protocol.client.client import Client
from dps.protocol.client.read_point import ReadPoint
from dps.protocol.messages import Loss
from dps.shown import brief

T = TypeVar("T")
Keys = Sequence[int] | np.ndarray

NOTHING: Mapping[str, Any] = MappingProxyType({})
MOST_LAYOUTS = 64  # that are kept, of choices of arrays to compute the gradients of


class Handle(Generic[T]):
    """A request that is under way, as in ps-lite: made by the `…_async` methods. Thread-safe."""

    def __init__(self, future: Future[Any], result: Callable[[Any], T]) -> None:
        self._future = future
        self._result = result

    def done(self) -> bool:
        """Whether the request has ended."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the request and return what the blocking method returns.

        Raises
        ------
        TimeoutError
            It did not end within `timeout` seconds; it goes on.
        DpsError
            Whatever the blocking method raises.
        ConfigurationError
            `timeout` is no number, 0 or above.
        """
        limit = None if timeout is None else _seconds("timeout", timeout)
        return self._result(self._future.result(limit))


def as_arrays(gradients: Arrays, layout: Layout) -> Arrays:
    """Return gradients as plain arrays of the parameters' dtypes, such as they are where possible.

    Raises
    ------
    ShapeMismatch
        They are no mapping, or one is masked, or cannot be read as an array where it is.
    """
    if not isinstance(gradients, Mapping):
        raise ShapeMismatch(
            f"gradients={shown(gradients)}, expected a mapping of names to arrays, such as "
            "{'w': gradient}; sparse tables have theirs in rows={…}"
        )
    if isinstance(gradients, FlatArrays):
        return gradients
    known = layout.names  # what has another name is for the layout to refuse
    return {
        name: as_gradient(repr(name), value, known[name].dtype, ShapeMismatch)
        if name in known
        else value
        for name, value in gradients.items()
    }


def check_worker(worker: object) -> None:
    """Refuse what is no worker; raises `ConfigurationError`."""
    if not isinstance(worker, Worker):
        raise refused("worker", worker, "the Worker that a training function is called with")


def _seconds(name: str, value: object) -> float:
    number = real(value)
    if number is None or not 0 <= number < threading.TIMEOUT_MAX:
        raise refused(name, value, "a number, 0 or above")
    return number


def _check_flat(weights: object) -> None:
    if not isinstance(weights, FlatArrays):
        raise ShapeMismatch(
            f"weights={shown(weights)}, expected worker.layout.flat(names).over(buffer)"
        )


class Worker:
    """One worker of a parameter server, as its training function sees it.

    Requests to one shard are carried out in the order in which they were made. Not thread-safe:
    for one training function.

    Attributes
    ----------
    name
        "worker-0", "worker-1", …
    index, workers
        Its number, and how many workers were started with it.
    done
        How many updates of a worker of this name the weights held when it began: 0 at the start of
        a training. After `ParameterServer.resume`, or when it is started again in the place of a
        worker that was lost, its data can go on from there. Where a shard has fewer than another,
        as it was restored from an older checkpoint, it is the number of the one that has most.
    """

    def __init__(
        self,
        client: Client,
        loop: asyncio.AbstractEventLoop,
        records: WorkerRecords,
        leave: Leave,
        index: int,
        workers: int,
        platform: Platform,
        done: int = 0,
    ) -> None:
        self.name = client.worker
        self.index = index
        self.workers = workers
        self.done = done
        self._client = client
        self._loop = loop
        self._records = records
        self._leave = leave
        self._platform = platform
        self._given: ReadPoint | None = None
        self._buffered = 0
        self._pushed = 0
        self._flat: dict[tuple[str, ...], FlatLayout] = {}
        self._computing: dict[tuple[str, ...], FlatArrays] = {}

    @property
    def layout(self) -> Layout:
        """The parameters, and where they are."""
        return self._client.layout

    @property
    def consistency(self) -> Consistency:
        """The consistency model of the parameter server."""
        return self._client.consistency

    @property
    def read_point(self) -> ReadPoint | None:
        """Which weights this worker was given last; None: it has not pulled yet.

        Only those that a method has returned, such as `pull`, or `wait` of a handle: what has come
        since is not what the function computes on. `push` takes the point as `computed_on`.
        """
        return self._given

    @property
    def slack(self) -> int | None:
        """How many more gradients than one it may compute on the weights that it was given last.

        That is what SSP leaves of its bound; None: there is none, or it has not pulled yet.
        """
        slack = self._given.slack if self._given is not None else None
        return None if slack is None else max(0, slack - self._buffered)

    @property
    def dropped(self) -> int:
        """How many updates of this worker were refused as too stale, on one shard or more.

        That happens under BSP and SSP only, to a worker that was stopped, unreachable, or busy for
        longer than `Timings.patience`: the others did not wait for it. The driver issues an
        `UpdatesDroppedWarning`; if most updates of a worker were dropped, its future fails with
        `UpdatesDropped`.
        """
        return self._client.dropped

    @property
    def pushed(self) -> int:
        """How many updates this worker has pushed."""
        return self._pushed

    @property
    def losses(self) -> list[Loss]:
        """What was lost of this worker's acknowledged updates, one entry for each failure.

        It is known when the next request returns. The updates are gone from the shard: a training
        that must have them has to push them again.
        """
        return list(self._client.losses)

    @property
    def leaving(self) -> bool:
        """Whether this worker, or its node, is asked to leave: its function should return soon."""
        return self._client.leaving or self._leave.why is not None

    def __repr__(self) -> str:
        client, dropped = self._client, f", dropped {self.dropped:,}" if self.dropped else ""
        return (
            f"<Worker {self.name} of {self.workers}, incarnation {client.incarnation}, done before "
            f"{self.done:,}, pushed {self._pushed:,}{dropped}, consistency "
            f"{brief(client.consistency)}>"
        )

    def gradients(self, names: Iterable[str] = ()) -> FlatArrays:
        """Return arrays to compute gradients into, so that they can be pushed without a copy.

        They are the same ones until they are pushed; then they are the parameter server's, and the
        next call returns others, and these are read-only. So a gradient that is on its way is never
        written to.

        Parameters
        ----------
        names
            Of which parameters; empty: of all.

        Returns
        -------
        gradients
            Name → array with the shape and dtype of the parameter, views of one `buffer`. What they
            hold is arbitrary: write all of it. The mapping cannot be changed, but its arrays.

        Raises
        ------
        ShapeMismatch
            There is no parameter of such a name.
        """
        some = isinstance(names, Iterable) and not isinstance(names, str | np.ndarray)
        wanted: tuple[Any, ...] = tuple(names) if some else (None,)
        if not all(isinstance(name, str) for name in wanted):
            raise ShapeMismatch(f"names={shown(names)}, expected a list of names of parameters")
        if wanted not in self._flat:
            if len(self._flat) >= MOST_LAYOUTS:
                self._flat.clear()
            self._flat[wanted] = self.layout.flat(wanted or None)
        if wanted not in self._computing:
            self._computing[wanted] = self._client.empty(self._flat[wanted])
        return self._computing[wanted]

    def pull(self) -> dict[str, np.ndarray]:
        """Return the weights: name → array with the shape and dtype of the parameters.

        They are the caller's own: what is written into them goes nowhere else. Waits as the
        consistency model says.
        """
        return self.pull_async().wait()

    def pull_into(self, weights: FlatArrays) -> None:
        """Like `pull`, but write the weights into arrays of one's own.

        Parameters
        ----------
        weights
            Of all parameters or of some: `worker.layout.flat(names).over(buffer)`.
        """
        _check_flat(weights)
        Handle(self._begin(self._client.pull()), partial(self._write, weights)).wait()

    def push(
        self,
        gradients: Arrays = NOTHING,
        rows: Gradients = NOTHING,
        computed_on: ReadPoint | None = None,
    ) -> None:
        """Push gradients and wait until they are durable to the recovery strategy's promise.

        Where the consistency model refuses them as too stale, they are counted in `dropped`.

        Parameters
        ----------
        gradients
            Name → array of floats of the parameter's shape, which is cast to its dtype; of some or
            all parameters. What is no numpy array, but can be read as one where it is, such as a
            tensor of torch on the CPU, is taken as well.
        rows
            Name of a sparse table → keys, and an array (keys, width) of floats with the gradient of
            each key's row. Keys are whole numbers from 0 to 2⁶³ - 1, in any order; the
            gradients of one that is repeated are summed. They are one update with `gradients`, of
            each shard that holds some of them.
        computed_on
            The `read_point` of the weights that the gradients were computed on, which their
            staleness is counted from. None: of those that were given last.

        Raises
        ------
        ShapeMismatch, NonFiniteGradient
            They do not fit, or hold NaN or infinity; nothing was applied.
        ShardUnavailable
            A shard stayed down for too long.
        GroupClosed
            The parameter server was closed.
        TrainingStopped
            `ParameterServer.stop` was called, or this worker's Dask future was cancelled.
        UpdatesLost
            A shard has lost acknowledged updates, and `on_loss="raise"` was chosen.

        All other methods raise the last four as well.
        """
        self.push_async(gradients, rows, computed_on).wait()

    def push_pull(
        self,
        gradients: Arrays = NOTHING,
        rows: Gradients = NOTHING,
        computed_on: ReadPoint | None = None,
    ) -> dict[str, np.ndarray]:
        """Push gradients and return the weights after them, in one round trip."""
        return self.push_pull_async(gradients, rows, computed_on).wait()

    def pull_rows(self, table: str, keys: Keys) -> np.ndarray:
        """Return rows of a sparse table by their keys.

        Waits as the consistency model says, as `pull` does. There are no last rows to go on with
        while a shard is down, so this waits then, whatever the outage policy is.

        Parameters
        ----------
        table
            Its name.
        keys
            Whole numbers from 0 to 2⁶³ - 1, in any order; some may be repeated.

        Returns
        -------
        rows
            (keys, width), in the order asked for. A row that nobody has pushed to is as it begins.

        Raises
        ------
        ShapeMismatch
            An unknown table, or keys that are none; nothing was sent.
        ShardUnavailable
            A shard stayed down for too long.
        """
        return self.pull_rows_async(table, keys).wait()

    def pull_range(
        self, table: str, start: int = 0, stop: int = KEYS
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that exist with keys from `start` to below `stop`, else as `pull_rows`.

        Returns
        -------
        keys
            int64, sorted: those that were pushed to.
        rows
            (keys, width).
        """
        return self.pull_range_async(table, start, stop).wait()

    def pull_async(self) -> Handle[dict[str, np.ndarray]]:
        """Like `pull`, but return at once with a handle to wait on."""
        return Handle(self._begin(self._client.pull()), self._give)

    def push_async(
        self,
        gradients: Arrays = NOTHING,
        rows: Gradients = NOTHING,
        computed_on: ReadPoint | None = None,
    ) -> Handle[None]:
        """Like `push`, but return at once with a handle to wait on.

        The gradients must not be changed before the handle is done.
        """
        return Handle(self._push(gradients, False, rows, computed_on), lambda _: None)

    def push_pull_async(
        self,
        gradients: Arrays = NOTHING,
        rows: Gradients = NOTHING,
        computed_on: ReadPoint | None = None,
    ) -> Handle[dict[str, np.ndarray]]:
        """Like `push_pull`, but return at once with a handle to wait on.

        The gradients must not be changed before the handle is done.
        """
        return Handle(self._push(gradients, True, rows, computed_on), self._give)

    def push_pull_into(
        self,
        weights: FlatArrays,
        gradients: Arrays = NOTHING,
        rows: Gradients = NOTHING,
        computed_on: ReadPoint | None = None,
    ) -> Handle[None]:
        """Like `push_pull_async`; `wait` writes the weights into arrays as `pull_into` does."""
        _check_flat(weights)
        pushed = self._push(gradients, True, rows, computed_on)
        return Handle(pushed, partial(self._write, weights))

    def pull_rows_async(self, table: str, keys: Keys) -> Handle[np.ndarray]:
        """Like `pull_rows`, but return at once with a handle to wait on."""
        return Handle(self._begin(self._client.pull_rows(table, keys)), self._give_rows)

    def pull_range_async(
        self, table: str, start: int = 0, stop: int = KEYS
    ) -> Handle[tuple[np.ndarray, np.ndarray]]:
        """Like `pull_range`, but return at once with a handle to wait on."""
        return Handle(self._begin(self._client.pull_range(table, start, stop)), self._give_rows)

    def apply(self, function: str, *args: Any) -> list[Any]:
        """Run a registered function on every shard, once on each: see `ParameterServer.apply`.

        What this worker has pushed before is there when the function runs. It is no update of this
        worker's: under BSP it is part of no round, under SSP it moves no clock on.
        """
        return self.apply_async(function, *args).wait()

    def apply_async(self, function: str, *args: Any) -> Handle[list[Any]]:
        """Like `apply`, but return at once with a handle to wait on."""
        return Handle(self._begin(self._client.apply(function, args)), list)

    def now(self) -> float:
        """Return seconds on a clock that never goes back, for durations."""
        return self._platform.clock.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for so many seconds, of the same time that `now` tells.

        A training function that waits by this and not by `time.sleep` runs on virtual time as well
        (`dps.testing.VirtualCluster`).
        """
        self._platform.sleep(_seconds("seconds", seconds))

    def report(self, **metrics: float) -> None:
        """Record numbers about this step, such as `loss`; steps count up from 1.

        Raises
        ------
        ConfigurationError
            One is no number, nor an array or tensor of one; NaN and infinity are.
        """
        for name in metrics:
            if not is_name(name):
                raise refused("report: a name of a metric", name, "a text in UTF-8, not empty")
        numbers = {name: as_number(f"report: {name}", value) for name, value in metrics.items()}
        self._records.report(numbers, self._given.version if self._given is not None else None)

    def _push(
        self, gradients: Arrays, pull: bool, rows: Gradients, computed_on: ReadPoint | None
    ) -> Future[Any]:
        arrays = as_arrays(gradients, self.layout)
        for names, own in list(self._computing.items()):
            if own is arrays:
                own.freeze()
                del self._computing[names]
        if not isinstance(rows, Mapping):
            raise ShapeMismatch(
                f"rows={shown(rows)}, expected a mapping of names of tables to (keys, gradient)"
            )
        if not isinstance(computed_on, ReadPoint | None):
            raise refused("computed_on", computed_on, "a worker.read_point")
        point = computed_on or self._given
        # Here, not on the event loop: that has to renew the worker's lease meanwhile.
        try:
            parts = self._client.parts(arrays, rows)
        except DpsError as error:  # the handle's to raise
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed
        self._pushed += 1
        return self._begin(self._client.push_parts(parts, pull, point))

    def _give(self, pushed: int | None) -> dict[str, np.ndarray]:
        return self._client.own_weights(self._newest(pushed), private)

    def _write(self, weights: FlatArrays, pushed: int | None) -> None:
        self._client.write_weights(weights, self._newest(pushed))

    def _newest(self, pushed: int | None) -> ReadPoint:
        """What was read by now, after that update: it is given, so it will be computed on."""
        self._given = self._client.read_point()
        self._buffered = 0 if pushed is None else self._given.lacks(pushed)
        return self._given

    def _give_rows(self, rows: T) -> T:
        now = self._client.read_point()
        self._given = self._given.with_rows(now) if self._given is not None else now
        return rows

    def _begin(self, request: Coroutine[Any, Any, Any]) -> Future[Any]:
        return self._platform.begin(request, self._loop)
