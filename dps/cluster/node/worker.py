"""The worker, as its training function sees it: it pulls weights and pushes gradients.

The training function runs in a thread of a Dask node as one long task. The protocol's client runs
on the node's event loop, so a push continues while the function computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np

from dps.cluster.node.batches import Batches, Data
from dps.cluster.node.member import Member, leave_of
from dps.cluster.transport.memory import private
from dps.core.arguments import as_gradient, as_number, is_name
from dps.core.blocks import Arrays, Destination, FlatArrays, FlatLayout, Layout
from dps.core.consistency import Consistency
from dps.core.ranges import brief, real, refused, shown
from dps.core.rules.wrappers import frozen
from dps.core.tables.key_routing import Gradients
from dps.core.tables.table import KEYS
from dps.errors import DpsError, ShapeMismatch
from dps.protocol.client.client import Client
from dps.protocol.client.encoder import MakeOutbox, OnDevice
from dps.protocol.client.read_point import ReadPoint
from dps.protocol.messages import Loss

T = TypeVar("T")
Keys = Sequence[int] | np.ndarray
Report = Callable[[Mapping[str, float], ReadPoint | None], None]

NOTHING: Mapping[str, Any] = MappingProxyType({})
MAX_LAYOUTS = 64  # that `gradients` keeps: names that are chosen at random leave others behind


class Handle(Generic[T]):
    """A request that is under way, returned by the `…_async` methods of `Worker`. Thread-safe.

    >>> from concurrent.futures import Future
    >>> sent = Future()
    >>> handle = Handle(sent, lambda reply: reply + 1)
    >>> handle.done()
    False
    >>> sent.set_result(1)
    >>> handle.wait()
    2
    """

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
            It did not end within `timeout` seconds, and continues.
        DpsError
            What the blocking method raises.
        ConfigurationError
            `timeout` is not a number, 0 or above.
        """
        limit = None if timeout is None else _seconds("timeout", timeout)
        return self._result(self._future.result(limit))


def _as_arrays(gradients: Arrays, layout: Layout) -> Arrays:
    if isinstance(gradients, FlatArrays | OnDevice):
        return gradients
    if not isinstance(gradients, Mapping):
        raise ShapeMismatch(
            f"gradients={shown(gradients)}, expected a mapping of names to arrays, such as "
            "{'w': gradient}; gradients of sparse tables belong in rows={…}"
        )
    known = layout.names  # the layout refuses other names
    return {
        name: as_gradient(repr(name), value, known[name].dtype, ShapeMismatch)
        if name in known
        else value
        for name, value in gradients.items()
    }


def check_worker(worker: object) -> None:
    """Raise `ConfigurationError` unless it is a `Worker`."""
    if not isinstance(worker, Worker):
        raise refused("worker", worker, "the Worker that the training function receives")


def _seconds(name: str, value: object) -> float:
    number = real(value)
    if number is None or not 0 <= number < threading.TIMEOUT_MAX:
        raise refused(name, value, "a number, 0 or above")
    return number


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a worker in its group: its `index` among `peers`, which start together."""

    peers: Sequence[str]
    index: int
    nodes: Mapping[str, str]  # names by addresses
    stops: int  # how often the training has been stopped before


class Worker:
    """One worker of a parameter server, as its training function sees it.

    Requests to a shard are carried out in the order in which they were made. Not thread-safe: for
    one training function.

    Attributes
    ----------
    name
        "worker-0", "worker-1", …
    index, workers
        Its number, and how many workers were started with it.
    done
        How many updates of this worker the weights held when it began: 0 at the start of a
        training. After `ParameterServer.resume`, or after a restart of a lost worker, the training
        function can continue with the data after these. It is the highest number of any shard.
    pushed
        How many updates this worker has pushed.
    layout
        The parameters, and how they are placed on shards.
    consistency
        The consistency model of the parameter server.
    frozen
        The names of the parameters that its update rule does not train.
    batches
        The `Batches` that the function is called with, if it is called with any.

    Examples
    --------
    >>> from dps.testing import VirtualCluster
    >>> def train(worker):
    ...     weights = worker.pull()
    ...     for _ in range(3):
    ...         weights = worker.push_pull({"w": weights["w"]})
    ...     return worker.name, weights["w"]
    >>> with VirtualCluster() as cluster:
    ...     with ParameterServer(cluster, {"w": np.ones(2)}, optimizer=SGD(0.5)) as ps:
    ...         ps.run(train, workers=1)[0].result()
    ('worker-0', array([0.125, 0.125]))
    """

    def __init__(
        self,
        client: Client,
        member: Member,
        report: Report,
        place: Place,
        done: int,
        data: Data | None = None,
    ) -> None:
        self.name = client.worker
        self.index = place.index
        self.workers = len(place.peers)
        self.done = done
        self.pushed = 0
        self.layout: Layout = client.group.layout
        self.consistency: Consistency = client.group.consistency
        self.frozen = frozen(client.group.rule, self.layout.names)
        self._client = client
        self._platform = member.platform
        self._member = member
        self._requests: list[Future[Any]] = []  # those that may be under way
        self._report = report
        self._leave = leave_of(member.dask_worker)
        self._given: ReadPoint | None = None
        self._buffered = 0
        self._flat: dict[tuple[str, ...], FlatLayout] = {}
        self._computing: dict[tuple[str, ...], FlatArrays] = {}
        self.batches: Batches | None = None
        if data is not None:
            requests = self._begin, self._under_way, lambda: self.leaving
            self.batches = Batches(data, client, *requests)

    @property
    def read_point(self) -> ReadPoint | None:
        """The weights that a method of this worker returned last; None before the first pull.

        Weights that have arrived count only when a method, or `wait` of a handle, has returned
        them. `push` takes the point as `computed_on`.
        """
        return self._given

    @property
    def slack(self) -> int | None:
        """How many gradients after the next one it may compute on the weights that were returned
        last.

        That is the rest of the bound of SSP; None: there is no bound, or it has not pulled yet.
        """
        slack = self._given.slack if self._given is not None else None
        return None if slack is None else max(0, slack - self._buffered)

    @property
    def dropped(self) -> int:
        """How many updates of this worker were refused as too stale, on one shard or more.

        That happens only under BSP and SSP, to a worker that was stopped, unreachable, or busy for
        longer than `Timings.patience`. The driver issues an `UpdatesDroppedWarning`. If most were
        dropped, the worker's future fails with `UpdatesDropped`.
        """
        return self._client.dropped

    @property
    def losses(self) -> list[Loss]:
        """The losses of this worker's acknowledged updates, one entry for each failure.

        They are known when the next request returns. The shard lacks these updates: a training that
        needs them has to push them again.
        """
        return list(self._client.receipts.losses)

    @property
    def leaving(self) -> bool:
        """Whether this worker, or its node, was asked to leave: its function should return soon."""
        return self._client.leaving or self._leave.why is not None

    def __repr__(self) -> str:
        dropped = f", dropped {self.dropped:,}" if self.dropped else ""
        return (
            f"<Worker {self.name} of {self.workers}, incarnation {self._client.incarnation}, "
            f"done before {self.done:,}, pushed {self.pushed:,}{dropped}, "
            f"consistency {brief(self.consistency)}>"
        )

    def gradients(self, names: Iterable[str] = ()) -> FlatArrays:
        """Return arrays to compute gradients into, so that they can be pushed without a copy.

        Repeated calls return the same arrays until these are pushed. Then they become read-only,
        and the next call returns others, so no gradient is written to while it is sent.

        Parameters
        ----------
        names
            Names of parameters; empty: all.

        Returns
        -------
        gradients
            Name → array with the shape and dtype of the parameter, a view of one `buffer`. Its
            values are arbitrary: write all of them. The arrays cannot be replaced by others.

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
            if len(self._flat) >= MAX_LAYOUTS:
                self._flat.clear()
            self._flat[wanted] = self.layout.flat(wanted or None)
        if wanted not in self._computing:
            flat, empty = self._flat[wanted], self._client.router.transport.empty
            self._computing[wanted] = flat.over(empty((flat.nbytes,), "uint8"))
        return self._computing[wanted]

    def pull(self) -> dict[str, np.ndarray]:
        """Return the weights: name → array with the shape and dtype of the parameter.

        They are the caller's own and may be written to. Waits as the consistency model requires.
        """
        return self.pull_async().wait()

    def push(
        self,
        gradients: Arrays = NOTHING,
        rows: Gradients = NOTHING,
        computed_on: ReadPoint | None = None,
    ) -> None:
        """Push gradients and wait until they are as durable as the recovery strategy promises.

        With `Continue`, those for a shard that is down are buffered until it is served again.

        If the consistency model refuses them as too stale, they are counted in `dropped`.

        Parameters
        ----------
        gradients
            Name → array of floats of the parameter's shape, cast to its dtype, for some or all
            parameters. An object that numpy can read in place, such as a torch tensor on the CPU,
            will do.
        rows
            Name of a sparse table → keys, and a float array (keys, width) with the gradient of each
            key's row. Keys are whole numbers from 0 to 2⁶³ - 1, in any order; gradients of a
            repeated key are summed. Together with `gradients` they are one update.
        computed_on
            The `read_point` of the weights that the gradients were computed on, for their
            staleness; None: `worker.read_point`.

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

        Waits as the consistency model requires, and for a shard that is down, under every outage
        policy.

        Parameters
        ----------
        table
            Its name.
        keys
            Whole numbers from 0 to 2⁶³ - 1, in any order; some may be repeated.

        Returns
        -------
        rows
            (keys, width), in the order of `keys`. Rows without updates have their initial values.

        Raises
        ------
        ShapeMismatch
            An unknown table, or invalid keys; nothing was sent.
        ShardUnavailable
            A shard stayed down for too long.
        """
        return self.pull_rows_async(table, keys).wait()

    def pull_range(
        self, table: str, start: int = 0, stop: int = KEYS
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return existing rows with keys from `start` to below `stop`; otherwise like `pull_rows`.

        Returns
        -------
        keys
            int64, sorted: the keys with updates or initial rows.
        rows
            (keys, width).
        """
        request = self._client.pull_range(table, start, stop)
        return self._give_rows(self._begin(request).result())

    def pull_async(self) -> Handle[dict[str, np.ndarray]]:
        """Like `pull`, but return a handle at once."""
        return Handle(self._begin(self._client.pull()), self._give)

    def push_async(
        self,
        gradients: Arrays = NOTHING,
        rows: Gradients = NOTHING,
        computed_on: ReadPoint | None = None,
    ) -> Handle[None]:
        """Like `push`, but return a handle at once.

        The gradients must not be changed before the handle is done.
        """
        return Handle(self._push(gradients, False, rows, computed_on), lambda _: None)

    def push_pull_async(
        self,
        gradients: Arrays = NOTHING,
        rows: Gradients = NOTHING,
        computed_on: ReadPoint | None = None,
    ) -> Handle[dict[str, np.ndarray]]:
        """Like `push_pull`, but return a handle at once.

        The gradients must not be changed before the handle is done.
        """
        return Handle(self._push(gradients, True, rows, computed_on), self._give)

    def push_pull_into(
        self,
        weights: Destination,
        gradients: Arrays = NOTHING,
        rows: Gradients = NOTHING,
        computed_on: ReadPoint | None = None,
    ) -> Handle[None]:
        """Like `push_pull_async`, but `wait` writes the weights into your own arrays.

        These are for some or all parameters: `worker.layout.flat(names).over(buffer)`.
        """
        fits = isinstance(weights, Destination) and weights.layout.owner is self.layout
        if not fits:
            raise ShapeMismatch(
                f"weights={shown(weights)}, expected worker.layout.flat(names).over(buffer)"
            )
        pushed = self._push(gradients, True, rows, computed_on)
        if not isinstance(weights, FlatArrays):
            pushed.add_done_callback(lambda _: weights.expect(self._client.read_point().buffers))
        return Handle(pushed, lambda number: weights.fill(self._newest(number).buffers))

    def filter_by(self, make: MakeOutbox) -> None:
        """Filter the gradients of arrays on a device from now on; for `dps.torch`."""
        self._begin(self._client.filter_by(make)).result()

    def pull_rows_async(self, table: str, keys: Keys) -> Handle[np.ndarray]:
        """Like `pull_rows`, but return a handle at once."""
        return Handle(self._begin(self._client.pull_rows(table, keys)), self._give_rows)

    def apply(self, function: str, *args: Any) -> list[Any]:
        """Run a registered function on every shard, once on each: see `ParameterServer.apply`.

        It runs after this worker's earlier updates. It is no update itself: under BSP it is part of
        no round, and under SSP it does not advance the worker's clock.
        """
        return self.apply_async(function, *args).wait()

    def apply_async(self, function: str, *args: Any) -> Handle[list[Any]]:
        """Like `apply`, but return a handle at once."""
        return Handle(self._begin(self._client.apply(function, args)), list)

    def now(self) -> float:
        """Return seconds on a clock that never goes back, for durations."""
        return self._platform.clock.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds, by the clock of `now`.

        Unlike `time.sleep`, it also works on virtual time (`dps.testing.VirtualCluster`).
        """
        self._platform.sleep(_seconds("seconds", seconds))

    def report(self, **metrics: float) -> None:
        """Record numbers about this step, such as `loss`; steps are numbered from 1.

        Raises
        ------
        ConfigurationError
            A value is not a number or a one-element array or tensor; NaN and infinity are allowed.
        """
        for name in metrics:
            if not is_name(name):
                raise refused("report: a name of a metric", name, "a text in UTF-8, not empty")
        numbers = {name: as_number(f"report: {name}", value) for name, value in metrics.items()}
        self._report(numbers, self._given)

    def _push(
        self, gradients: Arrays, pull: bool, rows: Gradients, computed_on: ReadPoint | None
    ) -> Future[Any]:
        arrays = _as_arrays(gradients, self.layout)
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
        batch = None
        if self.batches is not None:
            batch = self.batches.to_push(is_needed=bool(arrays or rows))
        # Here, not on the event loop, which must be free to renew the worker's lease.
        try:
            parts = self._client.encoder.split(arrays, rows)
        except DpsError as error:  # raised by the handle
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed
        self.pushed += 1
        update = parts, pull, computed_on or self._given, batch
        request = partial(self._client.push_parts, *update)
        if self._under_way():
            return self._begin(request())  # it must not overtake one whose task has not begun
        attempt = partial(self._client.begin_push, *update)
        return self._noted(self._member.begin_at_once(attempt, request))

    def _begin(self, request: Coroutine[Any, Any, T]) -> Future[T]:
        return self._noted(self._member.begin(request))

    def _noted(self, begun: Future[T]) -> Future[T]:
        self._requests = [*self._under_way(), begun]
        return begun

    def _under_way(self) -> list[Future[Any]]:
        return [sent for sent in self._requests if not sent.done()]

    def _give(self, pushed: int | None) -> dict[str, np.ndarray]:
        return self._client.own_weights(self._newest(pushed), private)

    def _newest(self, pushed: int | None) -> ReadPoint:
        """Return the last read, which is returned to the function that computes on it."""
        self._given = self._client.read_point()
        self._buffered = 0 if pushed is None else self._given.lacks(pushed)
        return self._given

    def _give_rows(self, rows: T) -> T:
        now = self._client.read_point()
        self._given = self._given.with_rows(now) if self._given is not None else now
        return rows
