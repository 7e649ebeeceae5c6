"""The residuals of one worker for one shard: the gradients that its filters have withheld.

A gradient is filtered once, when it is pushed, and the same operation is resent after failures. A
residual is part of no update until it is sent, so it is neither lost nor applied twice with one. It
is lost with the worker; a worker that leaves in order sends it as one last update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from operator import add

import numpy as np

from dps.core.blocks import Layout
from dps.core.filters.chain import FilterChain
from dps.core.filters.encoding import Stretch, assembled, encoded, stretches
from dps.core.filters.filter import Sending
from dps.core.updates import Operation

Array = np.ndarray

PLAIN = FilterChain()


@dataclass(frozen=True, slots=True)
class Counts:
    """The effect of filters: sums over gradients.

    Attributes
    ----------
    raw_bytes, sent_bytes
        Size of the gradients, and of the values and indices that were sent (once for each update).
    entries, withheld
        Number of entries, and of those that were not sent with their update.
    """

    raw_bytes: int = 0
    sent_bytes: int = 0
    entries: int = 0
    withheld: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A filtered operation, and the residuals after it, with the norm of each."""

    operation: Operation
    residuals: dict[str, Array]
    norms: dict[str, float]
    pushes: dict[str, int]
    counts: Counts
    lossless: tuple[bool, ...]


class Outbox:
    """The residuals of one worker for one shard. Not thread-safe.

    Attributes
    ----------
    counts
        The effect of the filters so far.
    """

    def __init__(self, layout: Layout, shard: int, chains: Mapping[str, FilterChain]) -> None:
        self._layout = layout.shards[shard]
        self._shard = shard
        self._chains = chains
        self._residuals: dict[str, Array] = {}
        self._norms: dict[str, float] = {}
        self._pushes: dict[str, int] = {}
        self.counts = Counts()

    def prepared(self, op: Operation, weights: Array | None) -> Prepared:
        """Return the filtered form of an operation with a dense, finite gradient.

        Nothing changes until `commit`. `weights` is the shard's buffer that the gradient was
        computed from, if the worker has read any. Errors are those of `FilterChain.filtered`.
        """
        assert op.gradient is not None
        of_shard = {s.name: s for s in stretches(self._layout, ())}
        sections, lossless, residuals, pushes = [], [], {}, {}
        entries = sent = 0
        for stretch in stretches(self._layout, op.pieces):
            name = stretch.name
            chain = self._chains.get(name, PLAIN)
            pushes[name] = self._pushes.get(name, 0) + 1
            base = None if weights is None else _part(weights, of_shard[name])
            sending = Sending(op.id, self._shard, name, pushes[name], base)
            gradient = _part(op.gradient, stretch)
            section, kept = chain.filtered(gradient, self._residuals.get(name), sending)
            sections.append(section)
            lossless.append(chain.lossless)
            if kept is not None:
                residuals[name] = kept
            entries += stretch.size
            sent += stretch.size if section.part.entries < 0 else section.part.entries
        counts = Counts(op.gradient.nbytes, entries=entries, withheld=entries - sent)
        with np.errstate(over="ignore"):
            norms = {name: float(np.linalg.norm(kept)) for name, kept in residuals.items()}
        return Prepared(assembled(op, sections), residuals, norms, pushes, counts, tuple(lossless))

    def commit(self, prepared: Prepared, sent_bytes: int) -> None:
        """Keep the residuals of an operation that is on its way, with a payload of that size."""
        self._residuals |= prepared.residuals
        self._norms |= prepared.norms
        self._pushes |= prepared.pushes
        self.counts += replace(prepared.counts, sent_bytes=sent_bytes)

    @property
    def nbytes(self) -> int:
        """Size of the residuals in bytes."""
        return sum(kept.nbytes for kept in self._residuals.values())

    @property
    def residual_norm(self) -> float:
        """The Euclidean norm of all residuals."""
        return math.hypot(*self._norms.values())

    def withheld(self) -> dict[str, Array]:
        """The residuals that are not zero, by array: 1-D, of this shard. For reading only."""
        return {name: kept for name, kept in self._residuals.items() if kept.any()}

    def remainder(self, op: Operation) -> Prepared:
        """Return the residuals, of which there must be some, as one more update of raw values."""
        kept = self.withheld()
        pieces = [i for i, piece in enumerate(self._layout.pieces) if piece.block.name in kept]
        op = replace(op, pieces=() if len(pieces) == len(self._layout.pieces) else tuple(pieces))
        chosen = stretches(self._layout, op.pieces)
        sections = [
            encoded(kept[s.name], kept[s.name] != 0, "raw", np.random.default_rng) for s in chosen
        ]
        lossless = tuple(self._chains.get(s.name, PLAIN).lossless for s in chosen)
        none = {name: np.zeros_like(residual) for name, residual in kept.items()}
        norms = dict.fromkeys(kept, 0.0)
        return Prepared(assembled(op, sections), none, norms, {}, Counts(), lossless)


def _part(buffer: Array, stretch: Stretch) -> Array:
    return buffer[stretch.begin : stretch.end].view(stretch.dtype)
