"""Chains of filters, their checks, and the gradients that they withhold at one worker.

A gradient is filtered once, when it is pushed, and the same operation is resent after failures. So
a residual is neither lost nor applied twice with an update. It is lost with the worker; a worker
that leaves in order sends it as one last update.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from operator import add

import numpy as np

from dps.core.blocks import Layout, all_finite
from dps.core.filters.encoding import Section, assembled, encoded, stretches, values_of
from dps.core.filters.filter import KKT, Filter, Lossless, Quantise, Selection, Sending
from dps.core.ranges import described, listed, refused, shown
from dps.core.rules.proximal import L1, ElasticNet
from dps.core.rules.rule import Array, UpdateRule, is_per_array, rule_for
from dps.core.rules.wrappers import EVERY
from dps.core.updates import Operation
from dps.errors import ConfigurationError, NonFiniteGradient


@dataclass(frozen=True, slots=True)
class FilterChain:
    """The filters of an array: selections in turn, then quantisation and compression."""

    selections: tuple[Selection, ...] = ()
    quantise: Quantise | None = None
    lossless: bool = False

    def filtered(
        self, gradient: Array, residual: Array | None, sending: Sending
    ) -> tuple[Section, Array | None]:
        """Return the encoded entries of a gradient plus residual, and the next residual, if any."""
        with np.errstate(over="ignore"):
            accumulated = gradient if residual is None else gradient + residual
        if residual is not None and not all_finite(accumulated):
            raise NonFiniteGradient(
                f"update {sending.update}: the gradient of {sending.array!r} with what its filters "
                "had withheld before is too large for its dtype; nothing of this update was applied"
            )
        mask, withheld = self._selected(accumulated, sending)
        section = self._encoded(accumulated, mask, sending)
        # A product is several times as fast as an assignment under a mask.
        kept = accumulated * withheld if any(s.feedback for s in self.selections) else None
        if self.quantise is not None and self.quantise.feedback:
            sent = values_of(section, str(accumulated.dtype), accumulated.size)
            if mask is None:
                kept = accumulated - sent
            else:
                kept = np.zeros_like(accumulated) if kept is None else kept
                kept[mask] = accumulated[mask] - (sent if sent.size < mask.size else sent[mask])
        return section, kept

    def changed(self, values: Array, copy: Array, sending: Sending) -> Section:
        """Return the encoded changes of 1-D weights, for a worker that has a copy of them.

        Quantised entries are differences, so that the next one makes up for rounding; others are
        the weights themselves.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            difference = values - copy
        if not all_finite(difference):  # training diverges, and all workers must see it
            return _raw(values, None)
        mask, _ = self._selected(difference, sending)
        if self.quantise is not None:
            return self._encoded(difference, mask, sending)
        section = _raw(values, mask)
        # A dense section would have zeros where the mask is false.
        return section if section.part.entries >= 0 else _raw(values, None)

    def _encoded(self, numbers: Array, mask: Array | None, sending: Sending) -> Section:
        quantise = self.quantise
        if quantise is None:
            return _raw(numbers, mask)
        rounding = replace(sending, place=len(self.selections))
        return encoded(numbers, mask, quantise.form, lambda: rounding.random(quantise.seed))

    def _selected(self, accumulated: Array, sending: Sending) -> tuple[Array | None, Array]:
        """Return masks of the entries that are sent (None: all), and of those kept for later."""
        kept = np.zeros(accumulated.size, bool)
        mask: Array | None = None
        for place, selection in enumerate(self.selections):
            given = accumulated.view() if mask is None else np.where(mask, accumulated, 0)
            given.flags.writeable = False  # a filter must not change what is sent
            left = selection.selected(given, replace(sending, place=place))
            _check_mask(left, selection, given, sending)
            withheld = ~left
            if mask is not None:
                left, withheld = mask & left, mask & withheld
            if selection.feedback:
                kept |= withheld
            mask = left
        return mask, kept


PLAIN = FilterChain()


def _raw(numbers: Array, mask: Array | None) -> Section:
    return encoded(numbers, mask, "raw", np.random.default_rng)


@dataclass(frozen=True, slots=True)
class Counts:
    """The effect of filters: sums over gradients."""

    raw_bytes: int = 0  # size of the gradients
    sent_bytes: int = 0  # size of the values and indices that were sent, once for each update
    entries: int = 0
    withheld: int = 0  # entries that were not sent with their update

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
    """The residuals of one worker for one shard, and `counts` so far. Not thread-safe."""

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
        computed from, if the worker has read any.
        """
        assert op.gradient is not None
        of_shard = {s.name: s for s in stretches(self._layout, ())}
        sections, lossless, residuals, pushes = [], [], {}, {}
        entries = sent = 0
        for stretch in stretches(self._layout, op.pieces):
            name = stretch.name
            chain = self._chains.get(name, PLAIN)
            pushes[name] = self._pushes.get(name, 0) + 1
            base = None if weights is None else of_shard[name].view(weights)
            sending = Sending(op.id, self._shard, name, pushes[name], base)
            gradient = stretch.view(op.gradient)
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

    def commit(self, prepared: Prepared) -> None:
        """Keep the residuals of an operation that is on its way."""
        self._residuals |= prepared.residuals
        self._norms |= prepared.norms
        self._pushes |= prepared.pushes
        self.counts += replace(prepared.counts, sent_bytes=prepared.operation.nbytes)

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
        op = op._replace(pieces=() if len(pieces) == len(self._layout.pieces) else tuple(pieces))
        names = [stretch.name for stretch in stretches(self._layout, op.pieces)]
        sections = [_raw(kept[name], kept[name] != 0) for name in names]
        lossless = tuple(self._chains.get(name, PLAIN).lossless for name in names)
        none = {name: np.zeros_like(residual) for name, residual in kept.items()}
        norms = dict.fromkeys(kept, 0.0)
        return Prepared(assembled(op, sections), none, norms, {}, Counts(), lossless)


def checked(
    filters: Mapping[str, Sequence[Filter]], names: Collection[str], rule: UpdateRule
) -> dict[str, FilterChain]:
    """Return the chain of each array that has filters; "*" stands for all others in `names`."""
    chains = _chains("filters", filters, names)
    for name, chain in filters.items():
        all_others = name == EVERY and is_per_array(rule)
        for array in [n for n in names if n not in filters] if all_others else [name]:
            _check_rule(name, chain, rule_for(rule, array))
    return chains


def checked_of_pulls(
    filters: Mapping[str, Sequence[Filter]], names: Collection[str]
) -> dict[str, FilterChain]:
    """Return the chain of each array whose weights are filtered when they are pulled."""
    chains = _chains("pull_filters", filters, names)
    for name, chain in filters.items():
        for selection in chain:
            if isinstance(selection, Selection) and not selection.feedback:
                raise ConfigurationError(
                    f"pull_filters[{name!r}]: {selection} drops what it withholds of a gradient; "
                    "weights need a filter that sends it later, such as SignificantlyModified"
                )
    return chains


def _chains(
    what: str, filters: Mapping[str, Sequence[Filter]], names: Collection[str]
) -> dict[str, FilterChain]:
    if not isinstance(filters, Mapping):
        expected = "a mapping of names of arrays to lists of filters, such as {'*': [TopK(0.05)]}"
        raise refused(what, filters, expected)
    chains = {}
    for name, chain in filters.items():
        if not isinstance(chain, list | tuple):
            raise refused(f"{what}[{name!r}]", chain, "a list of filters")
        chains[name] = _chain(f"{what}[{name!r}]", chain)
        if name != EVERY and name not in names:
            raise ConfigurationError(
                f"{what}[{shown(name)}]: there is no such array; there are: {listed(names)} "
                f"(and {EVERY!r} for all that are not named)"
            )
    found = {name: chains.get(name, chains.get(EVERY)) for name in names}
    return {name: chain for name, chain in found.items() if chain is not None}


def _chain(where: str, filters: Sequence[Filter]) -> FilterChain:
    kinds = [type(f).__name__ for f in filters]
    for given in filters:
        if isinstance(given, type) or not isinstance(given, Quantise | Lossless | Selection):
            raise ConfigurationError(
                f"{where}: {shown(given)} is no filter; expected one such as TopK(0.05), or an "
                "object with `feedback` and `selected`"
            )
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ConfigurationError(f"{where}: {kind} is there twice; keep one of them")
    stages = [isinstance(f, Quantise | Lossless) + isinstance(f, Lossless) for f in filters]
    if stages != sorted(stages):
        raise ConfigurationError(
            f"{where}: {', '.join(kinds)} in this order cannot work: first say which entries are "
            "sent, then Quantise, then Lossless"
        )
    return FilterChain(
        tuple(f for f in filters if not isinstance(f, Quantise | Lossless)),
        next((f for f in filters if isinstance(f, Quantise)), None),
        2 in stages,
    )


def _check_mask(mask: object, selection: Selection, gradient: Array, sending: Sending) -> None:
    # Integers would choose entries by their indices.
    if isinstance(mask, np.ndarray) and mask.dtype == bool and mask.shape == gradient.shape:
        return
    raise ConfigurationError(
        f"filters[{sending.array!r}]: {type(selection).__name__}.selected returned "
        f"{described(mask)}, expected a mask, bool{list(gradient.shape)}; nothing of update "
        f"{sending.update} was sent"
    )


def _check_rule(name: str, chain: Iterable[Filter], rule: UpdateRule) -> None:
    kkt = next((f for f in chain if isinstance(f, KKT)), None)
    if kkt is None:
        return
    while hasattr(rule, "rule"):  # StalenessAware and the like: the penalty is the inner rule's
        rule = rule.rule
    penalty = getattr(rule, "penalty", None)
    strength = {L1: "strength", ElasticNet: "l1"}.get(type(penalty))
    if strength is None or kkt.strength > getattr(penalty, strength):
        raise ConfigurationError(
            f"filters[{name!r}]: {kkt} withholds what a proximal rule with an L1 penalty of that "
            f"strength would undo, but the optimizer is {rule}; use Proximal(…, L1({kkt.strength}))"
            ", or leave KKT out"
        )
