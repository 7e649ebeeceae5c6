"""What one worker has not sent yet to one shard: the residuals that its filters keep.

A gradient is filtered once, when it is pushed; whatever happens on its way, the same operation is
sent again. What is withheld is no part of any update until it is sent, so it is neither lost nor
applied twice by what becomes of those. It lives and dies with the worker, unless that leaves in
order: then all that is left is sent as one last update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dps.core.blocks import Layout
from dps.core.filters.chain import FilterChain
from dps.core.filters.encoding import Section, Stretch, assembled, encoded, stretches
from dps.core.filters.filter import Sending
from dps.core.updates import Operation

Array = np.ndarray

PLAIN = FilterChain()


@dataclass(frozen=True, slots=True)
class Counts:
    """What filters did, summed.

    Attributes
    ----------
    raw_bytes, sent_bytes
        Of the gradients before filters, and of what was sent in their place (values and indices,
        once for each update).
    entries, withheld
        How many entries they had, and how many of these were not sent with their update.
    """

    raw_bytes: int = 0
    sent_bytes: int = 0
    entries: int = 0
    withheld: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.raw_bytes + other.raw_bytes,
            self.sent_bytes + other.sent_bytes,
            self.entries + other.entries,
            self.withheld + other.withheld,
        )


@dataclass(frozen=True, slots=True)
class Prepared:
    """A filtered operation, and what is kept once it is on its way, with the norm of each part."""

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
        What the filters did to the gradients that went through.
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
        """Return what is to be sent of a gradient; nothing changes until `commit`.

        Parameters
        ----------
        op
            With a dense gradient that is finite.
        weights
            The shard's buffer that the gradient was computed from, if the worker has read any.

        Raises
        ------
        NonFiniteGradient
            The gradient and what was withheld before are too large together.
        ConfigurationError
            A filter's selection is no mask.
        """
        assert op.gradient is not None
        of_shard = {s.name: s for s in stretches(self._layout, ())}
        sections, lossless, residuals, pushes = [], [], {}, {}
        for stretch in stretches(self._layout, op.pieces):
            name, whole = stretch.name, of_shard[stretch.name]
            chain = self._chains.get(name, PLAIN)
            pushes[name] = self._pushes.get(name, 0) + 1
            base = None if weights is None else _part(weights, whole)
            sending = Sending(op.id, self._shard, name, pushes[name], base)
            gradient = _part(op.gradient, stretch)
            section, kept = chain.filtered(gradient, self._residuals.get(name), sending)
            sections.append(section)
            lossless.append(chain.lossless)
            if kept is not None:
                residuals[name] = kept
        counts = _counted(stretches(self._layout, op.pieces), sections)
        with np.errstate(over="ignore"):
            norms = {name: float(np.linalg.norm(kept)) for name, kept in residuals.items()}
        return Prepared(assembled(op, sections), residuals, norms, pushes, counts, tuple(lossless))

    def commit(self, prepared: Prepared, sent_bytes: int) -> None:
        """Take note that a filtered operation is on its way, with a payload of that length."""
        self._residuals |= prepared.residuals
        self._norms |= prepared.norms
        self._pushes |= prepared.pushes
        self.counts += replace(prepared.counts, sent_bytes=sent_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept here."""
        return sum(kept.nbytes for kept in self._residuals.values())

    @property
    def residual_norm(self) -> float:
        """The Euclidean norm of all that is withheld."""
        return math.hypot(*self._norms.values())

    def withheld(self) -> dict[str, Array]:
        """What is withheld, by array: 1-D, the part that is on this shard. For reading only."""
        return {name: kept for name, kept in self._residuals.items() if kept.any()}

    def remainder(self, op: Operation) -> Prepared:
        """Return all that is withheld, of which there must be some, as one more update.

        Its values are written as they are.
        """
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


def _counted(chosen: tuple[Stretch, ...], sections: list[Section]) -> Counts:
    entries = sum(stretch.size for stretch in chosen)
    parts = [section.part for section in sections]
    sent = sum(
        stretch.size if part.entries < 0 else part.entries
        for stretch, part in zip(chosen, parts, strict=True)
    )
    raw = sum(stretch.end - stretch.begin for stretch in chosen)
    return Counts(raw_bytes=raw, entries=entries, withheld=entries - sent)
