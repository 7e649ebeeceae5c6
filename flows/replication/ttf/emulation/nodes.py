"""What runs on the nodes of the emulation: servers, saver, store, and the workers' tasks.

Plain Dask actors and tasks. Actors are called by address and key, as a proxy that is passed to a
task would make Dask end the task together with the actor.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from distributed import get_worker
from distributed.protocol import to_serialize
from distributed.utils import sync

from dps.cluster.node.recorder import Recorder, joined, sample
from dps.cluster.platform import SYSTEM, SystemClock
from dps.cluster.transport.calls import Meter
from dps.events import Acked, Applied, CheckpointWritten, Evaluated, Reported
from flows.analysis.throughput import COMPUTE
from flows.config.workload import workload_of
from flows.replication.ttf.emulation.settings import PublishedConfig
from flows.workloads import Array, Arrays, Dataset

ASK_SECONDS = 20.0
SAMPLE_SECONDS = 0.25
IDLE_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor is: the name and address of its node, and its key."""

    node: str
    address: str
    key: str


@dataclass(frozen=True, slots=True)
class State:
    """What a server holds; `version` counts the gradients in it."""

    weights: Arrays
    version: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient with its number, the version and time of its weights, and the time it took."""

    number: int
    values: Arrays
    version: int
    read: float
    seconds: float


async def call(pool: Any, place: Place, method: str, *args: Any) -> Any:
    """Call a method of an actor through a Dask connection pool."""
    async with asyncio.timeout(ASK_SECONDS):
        arguments = [to_serialize(arg) for arg in args]
        peer = pool(place.address)
        reply = await peer.actor_execute(actor=place.key, function=method, args=arguments)
    if reply["status"] != "OK":
        raise reply["exception"]
    return reply["result"]


def ask(node: Any, place: Place, method: str, *args: Any) -> Any:
    """Call an actor from a thread of a node, and wait."""
    return sync(node.loop, call, node.rpc, place, method, *args)


# -- actors ------------------------------------------------------------------------------------


class Member:
    """An actor that records what happens on its node, and what its process uses."""

    def __init__(self, group: str, node: str, role: str) -> None:
        self.dask = get_worker()
        self.clock = SystemClock()
        self.record = Recorder(group, self.dask.log_event)
        self._about = (node, role)
        self.node = node
        self.record(joined(node, role, SYSTEM))
        self.dask.loop.add_callback(self._start)

    def stored_bytes(self) -> int:
        """Bytes that this node holds for others."""
        return 0

    async def finish(self) -> None:
        """Stop recording and send the last events."""
        self._recording.cancel()
        self._flush()

    def _start(self) -> None:
        self._recording = asyncio.ensure_future(self._record_forever())

    async def _record_forever(self) -> None:
        while True:
            self._flush()
            await asyncio.sleep(SAMPLE_SECONDS)

    def _flush(self) -> None:
        self.record(sample(*self._about, Meter(), self.stored_bytes()))
        self.record.send()


class Saver(Member):
    """Holds the newest checkpoint in its memory."""

    def __init__(self, group: str, node: str, role: str) -> None:
        super().__init__(group, node, role)
        self._saved: State | None = None

    def save(self, state: State) -> None:
        """Take a checkpoint in the place of the one before."""
        self._saved = state
        self.record(
            CheckpointWritten(self.clock.now(), 0, 1, state.version, self.stored_bytes(), 0.0)
        )

    def load(self) -> State | None:
        """Return the newest checkpoint; None: there was none yet."""
        return self._saved

    def stored_bytes(self) -> int:
        """Size of the checkpoint."""
        return _nbytes([self._saved.weights]) if self._saved else 0


class Trainer(Member):
    """What all servers share: applying gradients, and measuring accuracy on their own time."""

    def __init__(
        self, group: str, node: str, role: str, config: PublishedConfig, epoch: int
    ) -> None:
        super().__init__(group, node, role)
        self.config = config
        self._epoch = epoch

    def step(self, state: State, gradients: Sequence[Gradient], rate: float) -> State:
        """Return the state after one step with the sum of the gradients."""
        weights = {
            name: old - np.asarray(rate * sum(g.values[name] for g in gradients), old.dtype)
            for name, old in state.weights.items()
        }
        after, now = State(weights, state.version + len(gradients)), self.clock.now()
        count = len(gradients)
        self.record(
            Applied(
                now,
                self.node,
                0,
                self._epoch,
                True,
                times=(now,) * count,
                workers=("worker-0",) * count,
                incarnations=(0,) * count,
                seqs=tuple(g.number for g in gradients),
                versions=tuple(range(state.version + 1, after.version + 1)),
                staleness=tuple(state.version - g.version for g in gradients),
                staleness_seconds=tuple(now - g.read for g in gradients),
                replayed=(False,) * count,
            )
        )
        return after

    def score(self, state: State) -> None:
        """Evaluate the weights here and now, while the training waits."""
        now, data = self.clock.now(), _data(self.config, "test")
        loss, accuracy = _workload(self.config).evaluate(state.weights, data.x_test, data.y_test)
        self.record(Evaluated(now, float(state.version), loss, accuracy))


class Server(Trainer):
    """A server of "checkpoint" or "chain": whoever calls `apply` waits for all that it does.

    Every `copy_every` updates it sends its state on: to the saver, or to its successor, which sends
    it on in turn. Nobody waits for the end of the chain.
    """

    def __init__(
        self,
        group: str,
        node: str,
        role: str,
        config: PublishedConfig,
        epoch: int,
        state: State,
        saver: Place | None,
    ) -> None:
        super().__init__(group, node, role, config, epoch)
        self._state = state
        self._saver = saver
        self._successor: Place | None = None
        _data(config, "test")

    def read(self) -> State:
        """Return weights and version."""
        return self._state

    def apply(self, gradient: Gradient) -> int:
        """Apply a gradient and return the new version."""
        self._state = self.step(self._state, [gradient], self.config.learning_rate)
        if self._state.version % self.config.evaluate_every == 0:
            self.score(self._state)
        if self._state.version % self.config.copy_every == 0:
            if self._saver is not None:
                ask(self.dask, self._saver, "save", self._state)
            self._send_on()
        return self._state.version

    def receive(self, state: State) -> None:
        """Take the predecessor's state."""
        self._state = state
        self._send_on()

    def follow(self, successor: Place) -> None:
        """Have a successor from now on."""
        self._successor = successor

    def promote(self, epoch: int) -> int:
        """Become the head; return the version that it goes on from."""
        self._epoch = epoch
        return self._state.version

    def _send_on(self) -> None:
        if self._successor is not None:
            self.dask.loop.add_callback(
                call, self.dask.rpc, self._successor, "receive", self._state
            )


class Store(Member):
    """The surviving half of the stateless server: weights, and a queue of gradients."""

    def __init__(self, group: str, node: str, role: str, state: State) -> None:
        super().__init__(group, node, role)
        self._state = state
        self._queue: list[Gradient] = []
        self._open = True

    def read(self) -> State:
        """Return weights and version."""
        return self._state

    def push(self, gradient: Gradient) -> bool:
        """Queue a gradient; return whether more are wanted."""
        self._queue.append(gradient)
        return self._open

    def take(self) -> tuple[State, list[Gradient]]:
        """Return the state and the whole queue, which is empty then."""
        taken, self._queue = self._queue, []
        return self._state, taken

    def put(self, state: State) -> None:
        """Take the state after a step."""
        self._state = state

    def close(self) -> None:
        """Want no more gradients."""
        self._open = False

    def stored_bytes(self) -> int:
        """Size of weights and queue."""
        return _nbytes([self._state.weights, *(g.values for g in self._queue)])


class StatelessServer(Trainer):
    """Takes what is queued, applies its sum and puts the weights back, until its process ends."""

    def __init__(
        self, group: str, node: str, role: str, config: PublishedConfig, epoch: int, store: Place
    ) -> None:
        super().__init__(group, node, role, config, epoch)
        self._store = store
        self._stopped = threading.Event()
        self._error: Exception | None = None
        _data(config, "test")
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    async def finish(self) -> None:
        """Stop serving and recording; raise what serving ended by, if it ended before."""
        self._stopped.set()
        await asyncio.to_thread(self._thread.join)
        await super().finish()
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
        try:
            self._apply_what_is_queued()
        except Exception as error:  # noqa: BLE001 (no caller would see it in this thread)
            self._error = error
            # Nothing would be applied any more: the worker ends, and with it the training.
            ask(self.dask, self._store, "close")

    def _apply_what_is_queued(self) -> None:
        due = 0.0
        while not self._stopped.is_set():
            state, queue = ask(self.dask, self._store, "take")
            if not queue:
                time.sleep(IDLE_SECONDS)
                continue
            late = len(queue) > self.config.long_queue
            rate = self.config.learning_rate / (10 if late else 1)
            state = self.step(state, queue, rate)
            ask(self.dask, self._store, "put", state)
            if self.clock.monotonic() >= due:
                self.score(state)
                due = self.clock.monotonic() + self.config.scaled(self.config.evaluate_gap)


# -- the worker's tasks ------------------------------------------------------------------------


def one_gradient(
    config: PublishedConfig, seed: int, number: int, server: Place
) -> tuple[int, float]:
    """Read the weights, compute a gradient and have it applied, as one task.

    Returns
    -------
    version, seconds
        The server's new version, and how long computing took.
    """
    node = get_worker()
    gradient = _gradient(config, seed, number, ask(node, server, "read"))
    return int(ask(node, server, "apply", gradient)), gradient.seconds


def work(config: PublishedConfig, seed: int, group: str, store: Place) -> int:
    """Compute gradients as long as the store wants them: one task for the whole trial."""
    node, clock, number, wanted = get_worker(), SystemClock(), 0, True
    record, sent = Recorder(group, node.log_event), clock.monotonic()
    while wanted:
        gradient = _gradient(config, seed, number, ask(node, store, "read"))
        wanted = ask(node, store, "push", gradient)
        now = clock.now()
        record(acked(now, number, gradient.version, "buffered"))
        record(reported(now, number, gradient.seconds))
        number += 1
        if clock.monotonic() > sent + SAMPLE_SECONDS:
            record.send()
            sent = clock.monotonic()
    record.send()
    return number


def acked(now: float, number: int, version: int, outcome: str) -> Acked:
    """The event that the worker was told of what became of a gradient."""
    return Acked(now, "worker-0", 0, (now,), (0,), (number,), (version,), (outcome,))


def reported(now: float, number: int, seconds: float) -> Reported:
    """The event of how long computing a gradient took."""
    return Reported(now, "worker-0", 0, COMPUTE, (now,), (number + 1,), (seconds,))


def warm_up(config: PublishedConfig) -> None:
    """Load what gradients need and compute one, before the clock starts."""
    _gradient(config, 0, 0, State(initial(config, 0), 0))


def initial(config: PublishedConfig, seed: int, kill: int = 0) -> Arrays:
    """Draw random weights; those after each kill are others."""
    return _workload(config).initial(np.random.default_rng([seed, 0, kill]))


def _gradient(config: PublishedConfig, seed: int, number: int, state: State) -> Gradient:
    read, data = SystemClock().now(), _data(config, "train")
    batch = _batch(seed, number, len(data.x_train), config.batch_size)
    x, y, began = data.x_train[batch], data.y_train[batch], time.perf_counter()
    _, values = _workload(config).gradient(state.weights, x, y)
    return Gradient(number, values, state.version, read, time.perf_counter() - began)


def _batch(seed: int, number: int, examples: int, size: int) -> Array:
    """Draw a batch anew, as a new task does: it depends on seed and number alone."""
    rng = np.random.default_rng([seed, 1, number])
    return rng.choice(examples, size, replace=False)


@cache
def _data(config: PublishedConfig, part: Any) -> Dataset:
    return config.dataset.load(part)


_workload = cache(workload_of)  # one for all tasks of a process


def _nbytes(parts: Sequence[Arrays]) -> int:
    return sum(array.nbytes for arrays in parts for array in arrays.values())
