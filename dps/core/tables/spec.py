"""What a sparse table is: the width of its rows, and the values of a row before its first update.

These are a function of the seed, the key and the column alone, made of whole-number arithmetic and
one multiplication: every process on every machine computes the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dps.core import ranges
from dps.core.arguments import is_name

ROW_DTYPES = ("float64", "float32")
PARTITION_BITS = 8
PARTITIONS = 1 << PARTITION_BITS  # the units in which keys are placed on shards

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_LANES = np.uint64(0x0000FFFF0000FFFF)
_PIECE = 1 << 16


def mix64(numbers: np.ndarray) -> np.ndarray:
    """Return a hash of each uint64, as a fresh array (splitmix64: Steele, Lea and Flood 2014)."""
    z = numbers + _GOLDEN
    z ^= z >> np.uint64(30)
    z *= _FIRST
    z ^= z >> np.uint64(27)
    z *= _SECOND
    z ^= z >> np.uint64(31)
    return z


def partitions_of(keys: np.ndarray) -> np.ndarray:
    """The partition of each int64 key, from 0 to `PARTITIONS` - 1."""
    return (mix64(keys.view(np.uint64)) >> np.uint64(64 - PARTITION_BITS)).view(np.int64)


@dataclass(frozen=True, slots=True)
class Zeros:
    """Rows of zeros.

    >>> Zeros().rows(np.array([5]), width=2, dtype="float64")
    array([[0., 0.]])
    """

    def rows(self, keys: np.ndarray, width: int, dtype: str) -> np.ndarray:
        """Return the initial rows of these keys."""
        return np.zeros((len(keys), width), dtype)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Random numbers from [-limit, limit), the same for the same key.

    >>> bool(np.abs(Uniform(0.1).rows(np.array([5]), width=2, dtype="float64")).max() <= 0.1)
    True
    """

    limit: float
    seed: int = 0

    def __post_init__(self) -> None:
        ranges.not_negative(self, "limit")
        ranges.seed(self, "seed")

    def rows(self, keys: np.ndarray, width: int, dtype: str) -> np.ndarray:
        """Return the initial rows of these keys."""
        drawn = _draws(self.seed, keys, width, 1)[0] >> np.uint64(11)
        return _scaled(drawn, float(1 << 52), self.limit / (1 << 52), dtype)


@dataclass(frozen=True, slots=True)
class Normal:
    """Random numbers of mean 0, the same for the same key.

    They are sums of twelve uniform numbers, at most six standard deviations: logarithms and cosines
    would differ between machines.

    Parameters
    ----------
    std
        Standard deviation, 0 or above.
    seed
        Random seed.

    Examples
    --------
    >>> Normal(0.01).rows(np.array([5]), width=3, dtype="float32").shape
    (1, 3)
    """

    std: float
    seed: int = 0

    def __post_init__(self) -> None:
        ranges.not_negative(self, "std")
        ranges.seed(self, "seed")

    def rows(self, keys: np.ndarray, width: int, dtype: str) -> np.ndarray:
        """Return the initial rows of these keys."""
        # Each of three draws has four numbers of 16 bits, which are added in pairs.
        lanes = np.zeros((len(keys), width), np.uint64)
        for drawn in _draws(self.seed, keys, width, 3):
            lanes += drawn & _LANES
            lanes += (drawn >> np.uint64(16)) & _LANES
        total = (lanes & np.uint64(0xFFFFFFFF)) + (lanes >> np.uint64(32))
        mean, deviation = 12 * (_PIECE - 1) / 2, float(np.sqrt(_PIECE**2 - 1))
        return _scaled(total, mean, self.std / deviation, dtype)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Given:
    """Some rows exist from the start.

    Parameters
    ----------
    rows
        Array of shape (keys, width), of any floating-point type.
    keys
        Integers from 0 to 2⁶³ - 1, each once, in any order; None: 0, 1, 2, …
    otherwise
        The values of other rows before their first update.

    Examples
    --------
    >>> Given(np.zeros((2, 4)), keys=np.array([7, 3]), otherwise=Normal(0.01))
    Given(float64[2, 4])
    """

    rows: np.ndarray
    keys: np.ndarray | None = None
    otherwise: Zeros | Uniform | Normal = Zeros()

    def __post_init__(self) -> None:
        if not isinstance(self.rows, np.ndarray):
            raise ranges.refused("Given: rows", self.rows, "an array (keys, width)")
        if not isinstance(self.otherwise, Zeros | Uniform | Normal):
            raise ranges.refused("Given: otherwise", self.otherwise, "Zeros(), Uniform or Normal")

    def __repr__(self) -> str:
        return f"Given({self.rows.dtype}{list(self.rows.shape)})"


Initial = Zeros | Uniform | Normal | Given


@dataclass(frozen=True, slots=True)
class SparseSpec:
    """A sparse table: int64 key → a row of `width` numbers, which exists from its first update on.

    Parameters
    ----------
    name
        The name for pushes and pulls.
    width
        Length of a row, at least 1.
    dtype
        "float32" or "float64".
    initial
        The values of a row before its first update: `Zeros()`, `Uniform(limit)` or `Normal(std)`.
        For rows that exist from the start, an array (keys, width) of the rows with keys 0, 1, 2, …,
        or `Given(rows, keys)`.

    Examples
    --------
    >>> SparseSpec("embedding", width=16, initial=Normal(0.01)).row_nbytes
    64
    """

    name: str
    width: int
    dtype: str = "float32"
    initial: Initial | np.ndarray = Zeros()

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ranges.refused("SparseSpec: name", self.name, "a text")
        what, dtype = f"SparseSpec {self.name!r}", _dtype_name(self.dtype)
        width = ranges.whole_argument(f"{what}: width", self.width, 1, "numbers")
        if dtype not in ROW_DTYPES:
            raise ranges.refused(f"{what}: dtype", self.dtype, "'float32' or 'float64'")
        if isinstance(self.initial, np.ndarray):
            object.__setattr__(self, "initial", Given(self.initial))
        if not isinstance(self.initial, Initial):
            known = "Zeros(), Uniform(limit), Normal(std), an array of rows, or Given(rows, keys)"
            raise ranges.refused(f"{what}: initial", self.initial, known)
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "dtype", dtype)

    @property
    def row_nbytes(self) -> int:
        """Size of one row in bytes."""
        return self.width * np.dtype(self.dtype).itemsize

    def initial_rows(self, keys: np.ndarray) -> np.ndarray:
        """Return the rows of these keys before their first update."""
        initial = self.initial
        assert isinstance(initial, Zeros | Uniform | Normal)
        return initial.rows(keys, self.width, self.dtype)


def _draws(seed: int, keys: np.ndarray, width: int, count: int) -> list[np.ndarray]:
    """Return `count` arrays (keys, width) of random uint64."""
    start = mix64(keys.view(np.uint64) ^ mix64(np.array([seed], np.uint64)))[:, None]
    steps = np.arange(width * count, dtype=np.uint64) * _GOLDEN
    return [mix64(start + steps[i * width : (i + 1) * width]) for i in range(count)]


def _scaled(numbers: np.ndarray, mean: float, scale: float, dtype: str) -> np.ndarray:
    # The numbers are below 2⁵³, so float64 holds them exactly.
    values = numbers.astype(np.float64)
    values -= mean
    values *= scale
    return values.astype(dtype, copy=False)


def _dtype_name(dtype: Any) -> str:
    """Return numpy's name of a dtype, or "" if it is invalid."""
    try:
        return np.dtype(dtype).name if isinstance(dtype, str | type | np.dtype) else ""
    except (TypeError, ValueError):
        return ""
