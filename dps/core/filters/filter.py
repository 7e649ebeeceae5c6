"""The filters that a worker may put its gradients through before they are sent.

A selection says which entries of an array's gradient are sent now; quantisation and compression say
how. What a selection with error feedback withholds is added to the next gradient. Filters are plain
values without state: residuals and push numbers are kept by the sender (`dps.core.filters.outbox`).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

from dps.core import ranges
from dps.core.updates import UpdateId
from dps.errors import ConfigurationError

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Sending:
    """What a filter may know of the gradient that it is given.

    Attributes
    ----------
    update, shard, array
        The update, the shard that it is for, and the name of the array.
    push
        How often this worker has pushed this array to this shard, this time included.
    weights
        The weights that the gradient was computed from, like it; None: the worker has read none.
    place
        Which filter of the array's this is for, from 0.

    Notes
    -----
    For weights that a worker pulls, the gradient is by how much they differ from what the worker
    has, `weights` is that, `push` counts what it was sent since it last got all weights, and
    `update` has the worker, its incarnation and the number of the reply.
    """

    update: UpdateId
    shard: int
    array: str
    push: int
    weights: Array | None
    place: int = 0

    def random(self, seed: int) -> np.random.Generator:
        """A generator that is the same whenever this filter is given this gradient, and no other.

        Filters of one array draw differently with the same seed: rounding what was chosen by the
        numbers that it was chosen with would be biased.
        """
        worker, incarnation, seq = self.update
        names = zlib.crc32(worker.encode()), zlib.crc32(self.array.encode())
        return np.random.default_rng([seed, incarnation, seq, self.shard, self.place, *names])


@runtime_checkable
class Selection(Protocol):
    """Which entries of a gradient are sent: those of my own are written like this.

    `feedback` tells whether what is withheld is kept and added to the worker's next gradient of the
    array. If not, leaving it out must be harmless by itself.
    """

    @property
    def feedback(self) -> bool:
        """Whether what is withheld is added to the worker's next gradient of the array."""
        ...

    def selected(self, gradient: Array, sending: Sending) -> Array:
        """Return a mask of the entries to be sent.

        Parameters
        ----------
        gradient
            1-D, float32 or float64: the part of one array that is on one shard, with what was
            withheld before, and 0 where an earlier filter of the chain withholds an entry. Must not
            be written to.
        """
        ...


@dataclass(frozen=True, slots=True)
class SignificantlyModified:
    """Withhold what has changed little: entries with |g| ≤ threshold, where g is the sum since it
    was last sent (Li et al., NIPS 2014).

    Parameters
    ----------
    threshold
        In the unit of the gradient, 0 or above. At 0 only zeros are left out.
    decay
        "1/t": the threshold of push t is ``threshold / t``, which theory asks for. None: it stays.
    """

    threshold: float
    decay: Literal["1/t"] | None = None
    feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.not_negative(self, "threshold")
        if self.decay is not None:
            ranges.choice(self, "decay", "1/t")

    def selected(self, gradient: Array, sending: Sending) -> Array:
        """Return where the sum is above the threshold."""
        threshold = self.threshold / sending.push if self.decay else self.threshold
        significant: Array = np.abs(gradient) > threshold
        return significant


@dataclass(frozen=True, slots=True)
class KKT:
    """Withhold entries that would leave a weight at zero: w = 0 and |g| ≤ strength − delta.

    For proximal rules with an L1 penalty λ: these weights fulfil the optimality (Karush, Kuhn,
    Tucker) condition of zero, and the proximal operator would bring them back to zero anyway (Li et
    al., OSDI 2014, section 5.1). Nothing is kept of what is withheld. Each push must have the
    gradient of what the whole loss is, for it is compared with the whole penalty.

    Parameters
    ----------
    strength
        λ, the strength of the rule's L1 penalty or less, above 0.
    delta
        How far below λ a gradient must be, for safety as weights are a little old: 0 to λ.
    """

    strength: float
    delta: float = 0.0
    feedback: ClassVar[bool] = False

    def __post_init__(self) -> None:
        ranges.positive(self, "strength")
        ranges.not_negative(self, "delta")
        if self.delta > self.strength:
            raise ConfigurationError(
                f"KKT: delta={self.delta}, expected at most strength={self.strength}"
            )

    def selected(self, gradient: Array, sending: Sending) -> Array:
        """Return where a weight is not zero, or its gradient large enough to move it."""
        if sending.weights is None:
            return np.ones(gradient.size, bool)
        moved: Array = np.abs(gradient) > self.strength - self.delta
        moved |= sending.weights != 0
        return moved


@dataclass(frozen=True, slots=True)
class RandomSkip:
    """Withhold entries at random; they are sent with a later push, summed.

    Parameters
    ----------
    share
        The probability of each entry to be withheld, 0 or more and below 1.
    seed
        With it, the worker and its push number the same entries are drawn again.
    """

    share: float
    seed: int = 0
    feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.fraction(self, "share")
        ranges.seed(self, "seed")

    def selected(self, gradient: Array, sending: Sending) -> Array:
        """Return what the dice say."""
        drawn: Array = sending.random(self.seed).random(gradient.size, dtype=np.float32)
        return drawn >= self.share


@dataclass(frozen=True, slots=True)
class TopK:
    """Send the entries of the largest magnitude, k = share · size of them, one at least.

    The others are kept and added to the next gradient ("Sparsified SGD with memory", Stich,
    Cordonnier and Jaggi, NeurIPS 2018).

    Parameters
    ----------
    share
        Of the entries of an array that are on one shard; above 0, 1 at most.
    """

    share: float
    feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.share(self, "share")

    def selected(self, gradient: Array, sending: Sending) -> Array:
        """Return where the largest entries are; zeros are never sent."""
        count = max(1, round(self.share * gradient.size))
        magnitudes = np.abs(gradient)
        mask: Array = np.zeros(gradient.size, bool)
        mask[np.argpartition(magnitudes, gradient.size - count)[-count:]] = True
        mask &= magnitudes > 0
        return mask


@dataclass(frozen=True, slots=True)
class Quantise:
    """Write values in fewer bits.

    Parameters
    ----------
    form
        "bf16": the upper 16 bits of a float32, rounded to nearest, ties to even; what rounding
        takes away is kept and added to the next gradient. "int8": whole numbers of a scale that
        1,024 entries share, rounded up or down at random such that the expectation is exact;
        nothing is kept.
    seed
        For the rounding to int8.
    """

    form: Literal["bf16", "int8"]
    seed: int = 0

    def __post_init__(self) -> None:
        ranges.choice(self, "form", "bf16", "int8")
        ranges.seed(self, "seed")

    @property
    def feedback(self) -> bool:
        """Whether what rounding takes away is kept."""
        return self.form == "bf16"


@dataclass(frozen=True, slots=True)
class Lossless:
    """Compress what is left with lz4, where that makes it shorter; values stay bit by bit."""


Filter = Selection | Quantise | Lossless
