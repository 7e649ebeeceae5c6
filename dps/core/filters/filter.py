"""The filters of gradients before they are sent.

A selection chooses the entries of an array's gradient that are sent now; quantisation and
compression choose their form. Filters have no state: the sender keeps residuals and push numbers.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

from dps.core.ranges import Checked, Fraction, NotNegative, Positive, Seed, Share, refused
from dps.core.updates import UpdateId

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Sending:
    """The context of a gradient that a filter gets.

    In pulls, the gradient is the difference between the weights and the worker's copy, which is
    `weights`; `push` counts the replies since all weights were sent, and `update` numbers them.

    Attributes
    ----------
    update, shard, array
        The update, its shard, and the name of the array.
    push
        The number of pushes of this array to this shard by this worker, this one included.
    weights
        The weights that the gradient was computed from, like it; None: the worker has read none.
    place
        The place of the filter among those of the array, from 0.

    Examples
    --------
    >>> sending = Sending(UpdateId("worker-0", 1, 7), shard=0, array="w", push=1, weights=None)
    >>> bool(sending.random(seed=0).random() == sending.random(seed=0).random())
    True
    """

    update: UpdateId
    shard: int
    array: str
    push: int
    weights: Array | None
    place: int = 0

    def random(self, seed: int) -> np.random.Generator:
        """Return a generator that depends on the seed, the gradient and the place of the filter."""
        # With the same numbers for selection and rounding, the result would be biased.
        worker, incarnation, seq = self.update
        names = zlib.crc32(worker.encode()), zlib.crc32(self.array.encode())
        return np.random.default_rng([seed, incarnation, seq, self.shard, self.place, *names])


@runtime_checkable
class Selection(Protocol):
    """A filter that chooses the entries to send; your own have these members, thread-safe."""

    @property
    def feedback(self) -> bool:
        """Whether the other entries are added to the next gradient; otherwise, they are dropped."""
        ...

    def selected(self, gradient: Array, sending: Sending) -> Array:
        """Return a mask of the entries to send.

        The gradient is 1-D, float32 or float64, and read-only: the part of one array on one shard,
        plus the residual, and 0 where an earlier filter of the chain withholds an entry.
        """
        ...


@dataclass(frozen=True, slots=True)
class SignificantlyModified(Checked):
    """Withhold entries with |g| ≤ threshold, until their sum is larger (Li et al., NIPS 2014).

    Parameters
    ----------
    threshold
        In the unit of the gradient, 0 or above. At 0 only zeros are withheld.
    decay
        "1/t": the threshold of push t is ``threshold / t``, as in theory. None: it is constant.

    Examples
    --------
    >>> sending = Sending(UpdateId("worker-0", 1, 7), shard=0, array="w", push=2, weights=None)
    >>> SignificantlyModified(0.5, decay="1/t").selected(np.array([0.1, -0.3]), sending)
    array([False,  True])
    """

    threshold: NotNegative
    decay: Literal["1/t"] | None = None
    feedback: ClassVar[bool] = True

    def selected(self, gradient: Array, sending: Sending) -> Array:
        """Return where |g| is above the threshold."""
        threshold = self.threshold / sending.push if self.decay else self.threshold
        significant: Array = abs(gradient) > threshold
        return significant


@dataclass(frozen=True, slots=True)
class KKT(Checked):
    """Withhold entries that would leave a weight at zero: w = 0 and |g| ≤ strength − delta.

    For proximal rules with an L1 penalty λ, whose operator would set these weights to zero anyway:
    they fulfil the Karush-Kuhn-Tucker condition (Li et al., OSDI 2014, section 5.1). Withheld
    entries are dropped. Each push must have the gradient of the whole loss.

    Parameters
    ----------
    strength
        λ, at most that of the rule's L1 penalty, above 0.
    delta
        Safety margin for weights that are slightly stale, 0 to λ.

    Examples
    --------
    >>> weights = np.array([0.0, 0.0, 1.0])
    >>> sending = Sending(UpdateId("worker-0", 1, 7), shard=0, array="w", push=1, weights=weights)
    >>> KKT(strength=0.5).selected(np.array([0.4, 0.6, 0.0]), sending)
    array([False,  True,  True])
    """

    strength: Positive
    delta: NotNegative = 0.0
    feedback: ClassVar[bool] = False

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.delta > self.strength:
            raise refused("KKT: delta", self.delta, f"at most strength={self.strength}")

    def selected(self, gradient: Array, sending: Sending) -> Array:
        """Return where the weight is not zero or its gradient is large."""
        if sending.weights is None:
            return np.ones(gradient.size, bool)
        moved: Array = np.abs(gradient) > self.strength - self.delta
        moved |= sending.weights != 0
        return moved


@dataclass(frozen=True, slots=True)
class RandomSkip(Checked):
    """Withhold entries at random; their sum is sent with a later push.

    Parameters
    ----------
    share
        The probability that an entry is withheld, 0 or more and below 1.
    seed
        Random seed; the draws also depend on the worker and its update.

    Examples
    --------
    >>> sending = Sending(UpdateId("worker-0", 1, 7), shard=0, array="w", push=1, weights=None)
    >>> RandomSkip(share=0.0).selected(np.zeros(3), sending)
    array([ True,  True,  True])
    """

    share: Fraction
    seed: Seed = 0
    feedback: ClassVar[bool] = True

    def selected(self, gradient: Array, sending: Sending) -> Array:
        """Return a random mask."""
        drawn: Array = sending.random(self.seed).random(gradient.size, dtype=np.float32)
        return drawn >= self.share


@dataclass(frozen=True, slots=True)
class TopK(Checked):
    """Send the k = share · size entries of the largest magnitude, at least one.

    The others are added to the next gradient (Stich, Cordonnier and Jaggi, NeurIPS 2018).

    Parameters
    ----------
    share
        Share of the entries of an array on one shard, above 0 and at most 1.

    Examples
    --------
    >>> sending = Sending(UpdateId("worker-0", 1, 7), shard=0, array="w", push=1, weights=None)
    >>> TopK(0.5).selected(np.array([0.1, -3.0, 2.0, 0.0]), sending)
    array([False,  True,  True, False])
    """

    share: Share
    feedback: ClassVar[bool] = True

    def selected(self, gradient: Array, sending: Sending) -> Array:
        """Return where the largest entries are, without zeros."""
        count = max(1, round(self.share * gradient.size))
        magnitudes = np.abs(gradient)
        least = np.partition(magnitudes, -count)[-count]
        mask: Array = magnitudes > least
        ties = np.flatnonzero(magnitudes == least)[: count - np.count_nonzero(mask)]
        mask[ties] = least > 0
        return mask


@dataclass(frozen=True, slots=True)
class Quantise(Checked):
    """Send values in fewer bits.

    Parameters
    ----------
    form
        "bf16": the upper 16 bits of a float32, rounded to nearest, ties to even; the rounding error
        is added to the next gradient. "int8": integer multiples of a scale that 1,024 entries
        share, by stochastic rounding, which is unbiased.
    seed
        For the rounding to int8.

    Examples
    --------
    >>> [Quantise(form).feedback for form in ("bf16", "int8")]
    [True, False]
    """

    form: Literal["bf16", "int8"]
    seed: Seed = 0

    @property
    def feedback(self) -> bool:
        """Whether the rounding error is added to the next gradient."""
        return self.form == "bf16"


@dataclass(frozen=True, slots=True)
class Lossless:
    """Compress the result with lz4, where that makes it shorter; values stay bit by bit.

    >>> filters = {"w": (TopK(0.05), Quantise("int8"), Lossless())}
    """


Filter = Selection | Quantise | Lossless
