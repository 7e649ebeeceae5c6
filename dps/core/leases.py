"""Leased data: a data set that is divided into batches, each of which is applied once.

A pass over the data has epochs, an epoch has numbered batches, and a lease is a range of batches
that a worker takes at a time. Each shard records the batches whose updates it has applied. So a
batch that is computed again after a failure changes only the shards that lack it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Annotated, Any, NamedTuple
from zlib import crc32

import numpy as np

from dps.core.ranges import Checked, whole, whole_from
from dps.core.updates import Batch, Operation
from dps.errors import ConfigurationError


class Applied(NamedTuple):
    """The batches of an epoch that are applied: all `below` one, and a bit for each from there."""

    below: int = 0
    bits: bytes = b""  # the lowest first

    @property
    def batches(self) -> int:
        """How many batches these are."""
        return self.below + int.from_bytes(self.bits, "little").bit_count()

    def mask(self, begin: int) -> int:
        """Return a bit for each batch from `begin` on, which is `below` at most."""
        past = self.below - begin
        return int.from_bytes(self.bits, "little") << past | (1 << past) - 1


BatchRecord = dict[str, Applied]  # by `key_of` an epoch
NONE = Applied()
LEASE = 8  # batches that a worker takes at a time, by default


def key_of(name: str, epoch: int) -> str:
    """Return the key of an epoch of the pass of this name."""
    return f"{name}/{epoch}"


class Lease(NamedTuple):
    """Batches of one epoch that a worker computes, in order; `number` is the lease's own."""

    number: int
    epoch: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Division(Checked):
    """How a data set is divided.

    Parameters
    ----------
    examples
        How many there are.
    batch_size
        Examples in a batch; the last batch of a partition may have fewer.
    lease
        Batches that a worker takes at a time.
    epochs
        How often each example is used.
    shuffle
        The seed of their order, which differs between epochs; None: they are in order. It orders
        the partitions, and the examples of each.
    partitions
        The number of examples in each partition; a batch has examples of one. (): it is not
        divided.

    Examples
    --------
    >>> division = Division(examples=10, batch_size=4, lease=2, epochs=1, shuffle=None)
    >>> division.batches
    3
    >>> division.order(epoch=0).indices(2)
    (0, array([8, 9]))
    """

    examples: Annotated[int, whole_from(1, "examples")]
    batch_size: Annotated[int, whole_from(1, "examples")]
    lease: Annotated[int, whole_from(1, "batches")] = LEASE
    epochs: Annotated[int, whole_from(1, "epochs")] = 1
    shuffle: Annotated[int, whole_from(0, "as a seed")] | None = None
    partitions: tuple[int, ...] = ()

    @property
    def batches(self) -> int:
        """The number of batches in an epoch."""
        sizes = self.partitions or (self.examples,)
        return sum(-(-size // self.batch_size) for size in sizes)

    @property
    def title(self) -> str:
        """Text that is the same for equal sizes and settings; the number of a pass follows it."""
        sizes = crc32(repr(self.partitions).encode()) if self.partitions else self.examples
        return f"{sizes}/{self.batch_size}/{self.epochs}/{self.shuffle}#"

    def is_whole(self, name: str, record: BatchRecord) -> bool:
        """Whether a record has every batch of the pass of this name."""
        epochs = (record.get(key_of(name, epoch), NONE) for epoch in range(self.epochs))
        return all(applied.below >= self.batches for applied in epochs)

    def order(self, epoch: int) -> Order:
        """Return the order of an epoch."""
        return Order(self.partitions or (self.examples,), self.batch_size, self.shuffle, epoch)


class Order:
    """The order of the examples in an epoch: that of the partitions, and that of each one's rows.

    Examples
    --------
    >>> Order((3, 2), batch_size=2, shuffle=None, epoch=0).indices(2)
    (1, array([0, 1]))
    """

    def __init__(
        self, sizes: Sequence[int], batch_size: int, shuffle: int | None, epoch: int
    ) -> None:
        self._sizes, self._batch_size = sizes, batch_size
        self._seed = None if shuffle is None else (shuffle, epoch)
        self._partitions = self._permuted(len(sizes))
        self._ends = np.cumsum([-(-sizes[each] // batch_size) for each in self._partitions])
        self._rows: tuple[int, np.ndarray] | None = None  # of the partition that was used last

    def indices(self, batch: int) -> tuple[int, np.ndarray]:
        """Return the partition of a batch, and the indices of its examples there, int64."""
        place = int(np.searchsorted(self._ends, batch, side="right"))
        partition, before = int(self._partitions[place]), self._ends[place - 1] if place else 0
        size, begin = self._sizes[partition], int(batch - before) * self._batch_size
        end = min(begin + self._batch_size, size)
        if self._seed is None:
            return partition, np.arange(begin, end)
        if self._rows is None or self._rows[0] != partition:
            self._rows = partition, self._permuted(size, partition)
        return partition, self._rows[1][begin:end]

    def _permuted(self, count: int, *seed: int) -> np.ndarray:
        if self._seed is None:
            return np.arange(count)
        return np.random.default_rng((*self._seed, *seed)).permutation(count)


def has(record: BatchRecord, batch: Batch) -> bool:
    """Whether a batch is in a record."""
    below, bits = record.get(batch.epoch, NONE)
    at, bit = divmod(batch.number - below, 8)
    return at < 0 or (at < len(bits) and bool(bits[at] >> bit & 1))


def with_batches(record: BatchRecord, batches: Iterable[Batch]) -> BatchRecord:
    """Return a record with some batches more.

    >>> with_batches({}, [Batch("a", 0), Batch("a", 2)])
    {'a': Applied(below=1, bits=b'\\x02')}
    """
    after = dict(record)
    for epoch, number in batches:
        below, bits = after.get(epoch, NONE)
        if number >= below:
            after[epoch] = _applied(below, int.from_bytes(bits, "little") | 1 << number - below)
    return after


def in_all(records: Sequence[BatchRecord]) -> BatchRecord:
    """Return the batches that are in all of some records.

    >>> first, second = (with_batches({}, [Batch("a", n) for n in some]) for some in ([0, 1], [1]))
    >>> in_all([first, second])
    {'a': Applied(below=0, bits=b'\\x02')}
    """
    common = {}
    for epoch in set[str]().union(*records):
        each = [record.get(epoch, NONE) for record in records]
        begin = min(applied.below for applied in each)
        common[epoch] = _applied(begin, reduce(and_, (applied.mask(begin) for applied in each)))
    return common


def lacking(applied: Applied, count: int) -> Iterator[range]:
    """Yield the runs of an epoch's batches that are not applied; `count` is how many it has.

    >>> list(lacking(Applied(1, b"\\x05"), 6))
    [range(2, 3), range(4, 6)]
    """
    begin, bits = applied.below, int.from_bytes(applied.bits, "little")
    for at in range(applied.below, min(applied.below + bits.bit_length(), count)):
        if bits >> at - applied.below & 1:
            if begin < at:
                yield range(begin, at)
            begin = at + 1
    if begin < count:
        yield range(begin, count)


def without_repeats(record: BatchRecord, operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield operations, with a tick for each update whose batch is in the record or came before.

    The tick does not enter its batch, since the update that came before may yet be dropped.
    """
    seen = set[Batch]()
    for op in operations:
        repeated = op.batch is not None and (has(record, op.batch) or op.batch in seen)
        if op.batch is not None:
            seen.add(op.batch)
        yield as_tick(op) if repeated else op


def as_tick(op: Operation) -> Operation:
    """Return what stands for an update that changes nothing."""
    return Operation("tick", op.id)


def _applied(below: int, bits: int) -> Applied:
    ones = (bits ^ (bits + 1)).bit_length() - 1  # at the low end
    bits >>= ones
    return Applied(below + ones, bits.to_bytes(-(-bits.bit_length() // 8), "little"))


def examples_of(source: Any) -> int:
    """Return how many examples a data set has.

    It is a number, for indices alone; an array or a DataFrame, whose rows they are; a sequence of
    anything; or a tuple or dict of these, of equal lengths. Raises `ConfigurationError` otherwise.
    """
    if isinstance(source, tuple | dict) and source:
        parts = source.values() if isinstance(source, dict) else source
        lengths = [examples_of(part) for part in parts]
        if len({*lengths}) != 1:
            raise ConfigurationError(
                f"the parts of data have {lengths} examples, expected equal numbers: entries with "
                "the same index form one example"
            )
        return lengths[0]
    number = whole(source)
    if number is not None:
        return number
    is_sequence = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    is_text = isinstance(source, str | bytes | dict)
    is_number = getattr(source, "ndim", 1) == 0
    if is_text or is_number or not is_sequence or hasattr(source, "__dask_graph__"):
        raise ConfigurationError(
            f"data is {type(source).__name__}, expected a number of examples, an array, a sequence "
            "such as a list of files or a torch Dataset, or a tuple or dict of these; or a Dask "
            "array, DataFrame or bag, or a tuple of collections"
        )
    return len(source)


def chosen(source: Any, indices: np.ndarray) -> Any:
    """Return the examples of these indices, in the form of the data set.

    >>> chosen((np.arange(3) * 10, ["a", "b", "c"]), np.array([2, 0]))
    (array([20,  0]), ['c', 'a'])
    """
    if isinstance(source, tuple):
        return tuple(chosen(part, indices) for part in source)
    if isinstance(source, dict):
        return {name: chosen(part, indices) for name, part in source.items()}
    if whole(source) is not None:
        return indices
    if hasattr(source, "iloc"):
        return source.iloc[indices]
    if hasattr(source, "ndim"):
        return source[indices]
    return [source[int(index)] for index in indices]
