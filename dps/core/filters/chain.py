"""Chains of filters, their checks, and the gradients that they withhold at one worker.

A gradient is filtered once, when it is pushed, and the same operation is resent after failures. So
no residual is lost or applied twice with an update. It is lost with the worker; a worker that
leaves in order sends it as one last update.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from operator import add

import numpy as np

from dps.core.blocks import Empty, Layout, all_finite
from dps.core.filters.device import HOST, Device, Mask, Numbers
from dps.core.filters.encoding import Section, Stretch, assembled, nbytes_of_values, stretches
from dps.core.filters.filter import KKT, Filter, Lossless, Quantise, Selection, Sending
from dps.core.ranges import listed, refused, shown
from dps.core.rules.proximal import L1, ElasticNet
from dps.core.rules.rule import Array, UpdateRule, is_per_array, rule_for
from dps.core.rules.wrappers import EVERY
from dps.core.updates import Encoding, Operation
from dps.errors import ConfigurationError, NonFiniteGradient


@dataclass(frozen=True, slots=True)
class FilterChain:
    """The filters of an array: selections in turn, then quantisation and compression."""

    selections: tuple[Selection, ...] = ()
    quantise: Quantise | None = None
    lossless: bool = False

    @property
    def is_elementwise(self) -> bool:
        """Whether neighbouring arrays may be filtered as one."""
        return not self.selections and (self.quantise is None or self.quantise.form == "bf16")

    def filtered(
        self, gradient: Numbers, residual: Numbers | None, sending: Sending, device: Device
    ) -> tuple[Section, Numbers | None]:
        """Return the encoded entries of a gradient plus residual, and the next residual, if any."""
        with np.errstate(over="ignore"):
            accumulated = gradient if residual is None else gradient + residual
        if residual is not None and not device.all_finite(accumulated):
            raise NonFiniteGradient(
                f"update {sending.update}: the gradient of {sending.array!r} with earlier withheld "
                "values is too large for its dtype; nothing of this update was applied"
            )
        mask, withheld = self._selected(accumulated, sending, device)
        section = self._encoded(accumulated, mask, sending, device)
        # A product is several times as fast as an assignment under a mask.
        kept = None if withheld is None else accumulated * withheld
        if self.quantise is not None and self.quantise.feedback:
            sent = device.values(section, accumulated)
            if mask is None:
                kept = accumulated - sent
            else:
                kept = accumulated * 0 if kept is None else kept
                kept[mask] = accumulated[mask] - (sent if len(sent) < len(mask) else sent[mask])
        return section, kept

    def changed(self, values: Array, copy: Array, sending: Sending) -> Section:
        """Return the encoded changes of 1-D weights, for a worker that has a copy of them."""
        # Quantised entries are differences, so that the next one makes up for rounding; others are
        # the weights themselves.
        with np.errstate(over="ignore", invalid="ignore"):
            difference = values - copy
        if not all_finite(difference):  # training diverges, and all workers must see it
            return _raw(values, None)
        mask, _ = self._selected(difference, sending, HOST)
        if self.quantise is not None:
            return self._encoded(difference, mask, sending, HOST)
        section = _raw(values, mask)
        # A dense section would have zeros where the mask is false.
        return section if section.part.entries >= 0 else _raw(values, None)

    def _encoded(self, numbers: Numbers, mask: Mask, sending: Sending, device: Device) -> Section:
        quantise = self.quantise
        if quantise is None:
            return _raw(numbers, mask, device)
        rounding = replace(sending, place=len(self.selections))
        random = partial(rounding.random, quantise.seed)
        return device.encoded(numbers, mask, quantise.form, random)

    def _selected(
        self, accumulated: Numbers, sending: Sending, device: Device
    ) -> tuple[Mask, Mask]:
        """Return masks of the entries to send, and of those to keep for later.

        None: all are sent, or none are kept.
        """
        mask = kept = None
        for place, selection in enumerate(self.selections):
            given = accumulated if mask is None else device.where(mask, accumulated)
            left = device.selected(selection, given, replace(sending, place=place))
            withheld = ~left
            if mask is not None:
                left, withheld = mask & left, mask & withheld
            if selection.feedback:
                kept = withheld if kept is None else kept | withheld
            mask = left
        return mask, kept


PLAIN = FilterChain()


def _raw(numbers: Numbers, mask: Mask, device: Device = HOST) -> Section:
    return device.encoded(numbers, mask, "raw", np.random.default_rng)


@dataclass(frozen=True, slots=True)
class Counts:
    """The effect of filters: sums over gradients."""

    raw_bytes: int = 0  # size of the gradients
    sent_bytes: int = 0  # size of the values and indices that were sent, once for each update
    entries: int = 0
    withheld: int = 0  # entries that were not sent with their update

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(add, astuple(self), astuple(other)))


# Neighbouring arrays that are filtered as one have one residual, by their names.
Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A filtered operation, and all residuals after it, with the norm of each."""

    operation: Operation
    residuals: dict[Names, Numbers]
    norms: dict[Names, float]
    pushes: dict[str, int]
    counts: Counts
    lossless: tuple[bool, ...]


class Outbox:
    """The residuals of one worker for one shard, and `counts` so far. Not thread-safe."""

    waits = False  # whether `prepared` waits for a device, so that a thread should call it

    def __init__(
        self,
        layout: Layout,
        shard: int,
        chains: Mapping[str, FilterChain],
        empty: Empty = np.empty,
        device: Device = HOST,
    ) -> None:
        self._layout = layout.shards[shard]
        self._of_shard = {stretch.name: stretch for stretch in stretches(self._layout, ())}
        self._shard = shard
        self._chains = chains
        self._empty = empty  # allocates what is sent
        self._device = device  # where gradients and residuals are
        self._residuals: dict[Names, Numbers] = {}
        self._norms: dict[Names, float] = {}
        self.pushes: dict[str, int] = {}  # of each array
        self.counts = Counts()

    def prepared(self, op: Operation, weights: Array | None) -> Prepared:
        """Return the filtered form of an operation with a dense, finite gradient.

        Nothing changes until `commit`. `weights` is the shard's buffer that the gradient was
        computed from, if the worker has read any.
        """
        assert op.gradient is not None
        device = self._device
        sections, codec, lossless, residuals = [], [], [], {}
        pushes: dict[str, int] = {}
        entries = sent = 0
        for run in self._runs(op.pieces):
            names = tuple(stretch.name for stretch in run)
            chain = self._chains.get(names[0], PLAIN)
            pushes |= {each: self.pushes.get(each, 0) + 1 for each in names}
            name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            base = None if weights is None else self._of_shard[names[0]].view(weights)
            sending = Sending(op.id, self._shard, name, pushes[names[0]], base)
            whole = replace(run[0], end=run[-1].end)
            gradient = device.view(op.gradient, whole)
            section, kept = chain.filtered(gradient, self._residual(names), sending, device)
            sections.append(section)
            codec += _encodings(section, run)
            lossless += [chain.lossless] * len(run)
            if kept is not None:
                residuals[names] = kept
            entries += whole.size
            sent += whole.size if section.part.entries < 0 else section.part.entries
        counts = Counts(op.gradient.nbytes, entries=entries, withheld=entries - sent)
        before, norms = self._residuals, self._norms
        if any(map(self._have_parted, residuals)):
            now = {name for names in residuals for name in names}
            before = {key: kept for key, kept in self._apart().items() if key[0] not in now}
            norms = {key: device.norm(kept) for key, kept in before.items()}
        norms = norms | {names: device.norm(kept) for names, kept in residuals.items()}
        residuals = before | residuals
        op = op._replace(gradient=device.payload(sections, self._empty), codec=tuple(codec))
        return Prepared(op, residuals, norms, pushes, counts, tuple(lossless))

    def until_ready(self, op: Operation) -> None:
        """Wait until the gradient of an operation is computed, if the device is not the host."""

    def commit(self, prepared: Prepared) -> None:
        """Keep the residuals of an operation that is on its way."""
        self._residuals, self._norms = prepared.residuals, prepared.norms
        self.pushes |= prepared.pushes
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
        of_arrays = {names[0]: self._device.on_host(k) for names, k in self._apart().items()}
        return {name: kept for name, kept in of_arrays.items() if kept.any()}

    def remainder(self, op: Operation) -> Prepared:
        """Return the residuals, of which there must be some, as one more update of raw values."""
        kept = self.withheld()
        pieces = [i for i, piece in enumerate(self._layout.pieces) if piece.block.name in kept]
        op = op._replace(pieces=() if len(pieces) == len(self._layout.pieces) else tuple(pieces))
        names = [stretch.name for stretch in stretches(self._layout, op.pieces)]
        sections = [_raw(kept[name], kept[name] != 0) for name in names]
        lossless = tuple(self._chains.get(name, PLAIN).lossless for name in names)
        none = {names: residual * 0 for names, residual in self._residuals.items()}
        norms = dict.fromkeys(none, 0.0)
        return Prepared(assembled(op, sections), none, norms, {}, Counts(), lossless)

    def _runs(self, pieces: tuple[int, ...]) -> list[list[Stretch]]:
        """Return the arrays of a gradient, with neighbours that are filtered as one together."""
        chains = self._chains

        def alike(one: Stretch, other: Stretch) -> bool:
            chain = chains.get(one.name, PLAIN)
            is_same = one.dtype == other.dtype and chain == chains.get(other.name, PLAIN)
            return is_same and chain.is_elementwise

        runs: list[list[Stretch]] = []
        for stretch in stretches(self._layout, pieces):
            if runs and alike(runs[-1][-1], stretch):
                runs[-1].append(stretch)
            else:
                runs.append([stretch])
        return runs

    def _residual(self, names: Names) -> Numbers | None:
        """Return the residual of arrays, whether they were filtered together before or not."""
        if not self._have_parted(names):
            return self._residuals.get(names)
        known, device = self._apart(), self._device
        of_shard = [self._of_shard[name] for name in names]
        if len(names) == 1:
            return known.get(names)
        parts = [known.get((each.name,)) for each in of_shard]
        pairs = zip(parts, of_shard, strict=True)
        return device.joined(
            [device.zeros(s.size, s.dtype) if part is None else part for part, s in pairs]
        )

    def _have_parted(self, names: Names) -> bool:
        """Whether some of these arrays have a residual together with others, or without them."""
        some = {*names}
        return names not in self._residuals and any(some & {*key} for key in self._residuals)

    def _apart(self) -> dict[Names, Numbers]:
        """Return the residual of each array."""
        residuals: dict[Names, Numbers] = {}
        for names, kept in self._residuals.items():
            at = 0
            for name in names:
                size = self._of_shard[name].size
                residuals[(name,)] = kept[at : at + size]
                at += size
        return residuals


def _encodings(section: Section, run: Sequence[Stretch]) -> list[Encoding]:
    """Return the encoding of each array in a section of several, which are sent whole."""
    if len(run) == 1:
        return [section.part]
    form = section.part.values
    sizes = [nbytes_of_values(form, each.dtype, each.size, -1) for each in run]
    return [replace(section.part, value_bytes=size) for size in sizes]


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
                    f"pull_filters[{name!r}]: {selection} discards withheld values; weights need a "
                    "filter that sends them later, such as SignificantlyModified"
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
                f"{what}[{shown(name)}]: no such array; expected one of {listed(names)}, or "
                f"{EVERY!r} for all others"
            )
    chosen = {name: chains.get(name, chains.get(EVERY)) for name in names}
    return {name: chain for name, chain in chosen.items() if chain is not None}


def _chain(where: str, filters: Sequence[Filter]) -> FilterChain:
    kinds = [type(f).__name__ for f in filters]
    for given in filters:
        if isinstance(given, type) or not isinstance(given, Quantise | Lossless | Selection):
            raise ConfigurationError(
                f"{where}: {shown(given)} is not a filter; expected one such as TopK(0.05), or an "
                "object with `feedback` and `selected`"
            )
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ConfigurationError(f"{where}: {kind} is given twice; keep one of them")
    stages = [isinstance(f, Quantise | Lossless) + isinstance(f, Lossless) for f in filters]
    if stages != sorted(stages):
        raise ConfigurationError(
            f"{where}: {', '.join(kinds)} are in the wrong order; expected a filter that selects "
            "entries, then Quantise, then Lossless"
        )
    return FilterChain(
        tuple(f for f in filters if not isinstance(f, Quantise | Lossless)),
        next((f for f in filters if isinstance(f, Quantise)), None),
        2 in stages,
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
            f"filters[{name!r}]: {kkt} needs a proximal rule with the same L1 penalty, but the "
            f"optimizer is {rule}; use Proximal(…, L1({kkt.strength})), or leave KKT out"
        )
