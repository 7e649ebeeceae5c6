"""The filters of one array in their order, and the check that they work as a chain."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dps.core.blocks import all_finite
from dps.core.filters.encoding import Section, encoded, values_of
from dps.core.filters.filter import KKT, Filter, Lossless, Quantise, Selection, Sending
from dps.core.ranges import listed, refused, shown
from dps.core.rules.proximal import L1, ElasticNet
from dps.core.rules.rule import UpdateRule, is_per_array, rule_for
from dps.errors import ConfigurationError, NonFiniteGradient

Array = np.ndarray

EVERY = "*"


@dataclass(frozen=True, slots=True)
class FilterChain:
    """The filters of an array: selections in turn, then quantisation and compression."""

    selections: tuple[Selection, ...] = ()
    quantise: Quantise | None = None
    lossless: bool = False

    @property
    def feedback(self) -> bool:
        """Whether anything is kept for the next gradient."""
        rounding = self.quantise is not None and self.quantise.feedback
        return rounding or any(selection.feedback for selection in self.selections)

    def filtered(
        self, gradient: Array, residual: Array | None, sending: Sending
    ) -> tuple[Section, Array | None]:
        """Return the encoded entries of a gradient, and the residual for the next one.

        The gradient is 1-D and finite; the last residual, if any, is added to it.

        Raises
        ------
        NonFiniteGradient
            The sum overflows.
        ConfigurationError
            A selection did not return a mask of the gradient.
        """
        with np.errstate(over="ignore"):
            accumulated = gradient if residual is None else gradient + residual
        if residual is not None and not all_finite(accumulated):
            raise NonFiniteGradient(
                f"update {sending.update}: the gradient of {sending.array!r} with what its filters "
                "had withheld before is too large for its dtype; nothing of this update was applied"
            )
        mask, kept = self._selected(accumulated, sending)
        section = self._encoded(accumulated, mask, sending)
        if self.quantise is not None and self.quantise.feedback:
            sent = values_of(section, str(accumulated.dtype), accumulated.size)
            if mask is None:
                kept = accumulated - sent
            else:
                kept[mask] = accumulated[mask] - (sent if sent.size < mask.size else sent[mask])
        return section, kept if self.feedback else None

    def changed(self, values: Array, copy: Array, sending: Sending) -> Section:
        """Return the encoded changes of 1-D weights, for a worker that has a copy of them.

        Quantised entries are differences, so that the next one makes up for rounding; others are
        the weights themselves. Raises `ConfigurationError` if a selection returns no mask.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            difference = values - copy
        if not all_finite(difference):  # training diverges, and all workers must see it
            return encoded(values, None, "raw", np.random.default_rng)
        mask, _ = self._selected(difference, sending)
        if self.quantise is not None:
            return self._encoded(difference, mask, sending)
        section = encoded(values, mask, "raw", np.random.default_rng)
        if section.part.entries < 0:  # dense, with zeros where the mask is false
            return encoded(values, None, "raw", np.random.default_rng)
        return section

    def _encoded(self, numbers: Array, mask: Array | None, sending: Sending) -> Section:
        quantise = self.quantise
        if quantise is None:
            return encoded(numbers, mask, "raw", np.random.default_rng)
        rounding = replace(sending, place=len(self.selections))
        return encoded(numbers, mask, quantise.form, lambda: rounding.random(quantise.seed))

    def _selected(self, accumulated: Array, sending: Sending) -> tuple[Array | None, Array]:
        """Return the mask of the entries that are sent (None: all), and the residual."""
        kept = np.zeros_like(accumulated)
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
                kept[withheld] = accumulated[withheld]
            mask = left
        return mask, kept


def checked(
    filters: Mapping[str, Sequence[Filter]], names: Collection[str], rule: UpdateRule
) -> dict[str, FilterChain]:
    """Return the chain of each array that has filters.

    Parameters
    ----------
    filters
        Name of an array, or "*" for all others → its filters.
    names
        Of all arrays.

    Raises
    ------
    ConfigurationError
        An array is unknown, or its filters do not work together or with the rule.
    """
    chains = _chains("filters", filters, names)
    for name, chain in filters.items():
        all_others = name == EVERY and is_per_array(rule)
        for array in [n for n in names if n not in filters] if all_others else [name]:
            _check_rule(name, chain, rule_for(rule, array))
    return chains


def checked_of_pulls(
    filters: Mapping[str, Sequence[Filter]], names: Collection[str]
) -> dict[str, FilterChain]:
    """Return the chain of each array whose weights are filtered when they are pulled.

    Parameters and errors are those of `checked`; filters without feedback are refused as well.
    """
    chains = _chains("pull_filters", filters, names)
    for name, chain in filters.items():
        for selection in made(chain).selections:
            if not selection.feedback:
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
    for name, chain in filters.items():
        if not isinstance(chain, list | tuple):
            raise refused(f"{what}[{name!r}]", chain, "a list of filters")
        _check_order(f"{what}[{name!r}]", tuple(chain))
        if name != EVERY and name not in names:
            raise ConfigurationError(
                f"{what}[{shown(name)}]: there is no such array; there are: {listed(names)} "
                f"(and {EVERY!r} for all that are not named)"
            )
    chains = {name: made(chain) for name, chain in filters.items()}
    found = {name: chains.get(name, chains.get(EVERY)) for name in names}
    return {name: chain for name, chain in found.items() if chain is not None}


def made(filters: Sequence[Filter]) -> FilterChain:
    """Return checked filters as a chain."""
    return FilterChain(
        tuple(f for f in filters if not isinstance(f, Quantise | Lossless)),
        next((f for f in filters if isinstance(f, Quantise)), None),
        any(isinstance(f, Lossless) for f in filters),
    )


def _check_order(where: str, chain: tuple[object, ...]) -> None:
    kinds = [type(f).__name__ for f in chain]
    for given in chain:
        if isinstance(given, type) or not isinstance(given, Quantise | Lossless | Selection):
            raise ConfigurationError(
                f"{where}: {shown(given)} is no filter; expected one such as TopK(0.05), or an "
                "object with `feedback` and `selected`"
            )
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ConfigurationError(f"{where}: {kind} is there twice; keep one of them")
    stages = [isinstance(f, Quantise | Lossless) + isinstance(f, Lossless) for f in chain]
    if stages != sorted(stages):
        raise ConfigurationError(
            f"{where}: {', '.join(kinds)} in this order cannot work: first say which entries are "
            "sent, then Quantise, then Lossless"
        )


def _check_mask(mask: object, selection: Selection, gradient: Array, sending: Sending) -> None:
    """Refuse what is no mask: integers would choose entries by their indices."""
    found = type(mask).__name__
    if isinstance(mask, np.ndarray):
        if mask.dtype == bool and mask.shape == gradient.shape:
            return
        found = f"{mask.dtype}{list(mask.shape)}"
    raise ConfigurationError(
        f"filters[{sending.array!r}]: {type(selection).__name__}.selected returned {found}, "
        f"expected a mask, bool{list(gradient.shape)}; nothing of update {sending.update} was sent"
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
