"""Rules by name: each array and each sparse table has its own, or is not trained."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from dps.core.ranges import listed, refused, shown
from dps.core.rules.rule import (
    Array,
    Out,
    Slots,
    Stepped,
    UpdateRule,
    by_rows,
    is_rule,
    needs_base,
    rule_for,
    within,
)
from dps.core.rules.wrappers import clipping_of
from dps.errors import ConfigurationError

EVERY = "*"


@dataclass(frozen=True, slots=True)
class Frozen:
    """The rule of arrays that are not trained.

    Workers do not send their gradients, and clip the norm of the others.

    >>> Frozen().step(np.ones(1), np.ones(1), {}, t=1, scale=1.0)[0]
    array([1.])
    """

    slots: ClassVar[tuple[str, ...]] = ()

    def step(
        self, values: Array, gradient: Array, slots: Slots, t: int, scale: float, out: Out = None
    ) -> Stepped:
        """Return the values as they are."""
        return np.positive(values, out=out), {}


@dataclass(frozen=True)
class PerArray:
    """A rule for each array and sparse table, by names.

    ``ParameterServer(…, optimizer={"embedding": AdaGrad(0.1), "*": AdamW()})`` makes one.

    Parameters
    ----------
    rules
        Pairs of a name and its rule. In a name, ``*`` stands for any characters, as in
        ``"*.bias"``. A full name goes before patterns, and ``"*"`` after all others; otherwise the
        first that matches counts.

    Notes
    -----
    Each slot of optimizer state is as large as the shard, also if only some arrays use it; tables
    have the slots of their own rule. `Clipped` goes around it, because it clips whole gradients;
    other wrappers may be inside or outside.

    Examples
    --------
    >>> rules = PerArray((("head.bias", Frozen()), ("*.bias", SGD(0.2)), ("*", SGD(0.1))))
    >>> [rules.rule_for(name) for name in ("head.bias", "body.bias", "body.weight")]
    [Frozen(), SGD(learning_rate=0.2), SGD(learning_rate=0.1)]
    """

    rules: tuple[tuple[str, UpdateRule], ...]
    per_array: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.rules, tuple | list) or any(
            not isinstance(pair, tuple | list) or len(pair) != 2 for pair in self.rules
        ):
            raise refused("PerArray: rules", self.rules, "pairs of a name and a rule")
        object.__setattr__(self, "rules", tuple(map(tuple, self.rules)))
        for name, rule in self.rules:
            if not isinstance(name, str) or not name:
                raise ConfigurationError(
                    f"optimizer[{shown(name)}]: expected the name of an array, as text"
                )
            if not is_rule(rule):
                raise refused(f"optimizer[{name!r}]", rule, "an update rule such as SGD(0.1)")
            if clipping_of(rule) is not None:
                raise ConfigurationError(
                    f"optimizer[{name!r}]: a gradient is clipped as a whole; put Clipped(…) around "
                    "all rules: Clipped(PerArray((…)), norm=…)"
                )
            if within(rule, PerArray) is not None:
                raise ConfigurationError(f"optimizer[{name!r}] has rules by names within it")
        names = [name for name, _ in self.rules]
        if not names:
            raise ConfigurationError("optimizer: expected the rule of one array at least")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigurationError(f"optimizer[{twice!r}] is there twice; keep one of them")

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of all rules."""
        return tuple(dict.fromkeys(slot for _, rule in self.rules for slot in rule.slots))

    @property
    def by_rows(self) -> bool:
        """Whether any rule needs whole rows."""
        return any(by_rows(rule) for _, rule in self.rules)

    @property
    def needs_base(self) -> bool:
        """Whether any rule needs the weights that gradients were computed from."""
        return any(needs_base(rule) for _, rule in self.rules)

    def rule_for(self, name: str) -> UpdateRule:
        """The rule of an array or table; raises `ConfigurationError` if it has none."""
        chosen = self.chosen(name)
        if chosen is None:
            raise ConfigurationError(
                f"optimizer: no rule for {name!r}; name it, or add {EVERY!r} for all that are not "
                "named (Frozen() if they are not to be trained)"
            )
        return self._rules[chosen]

    def chosen(self, name: str) -> str | None:
        """The entry whose rule an array or table has, if any."""
        if name in self._rules:
            return name
        return next((entry for entry, pattern in self._patterns if pattern.fullmatch(name)), None)

    def step(
        self, values: Array, gradient: Array, slots: Slots, t: int, scale: float, out: Out = None
    ) -> Stepped:
        """Refuse: which rule it is depends on the name; see `rule_for`."""
        raise ConfigurationError("rules by names take no step with arrays that have no name")

    @cached_property
    def _rules(self) -> dict[str, UpdateRule]:
        return dict(self.rules)

    @cached_property
    def _patterns(self) -> list[tuple[str, re.Pattern[str]]]:
        wild = sorted((name for name in self._rules if EVERY in name), key=lambda n: n == EVERY)
        return [(n, re.compile(".*".join(map(re.escape, n.split(EVERY))))) for n in wild]


def as_rule(optimizer: object) -> UpdateRule:
    """Return an update rule; a mapping makes a `PerArray`, and other arguments are refused."""
    rule: Any = PerArray(tuple(optimizer.items())) if isinstance(optimizer, Mapping) else optimizer
    if not is_rule(rule):
        mapping = "a mapping of names of arrays to update rules"
        raise refused("optimizer", rule, f"an update rule such as SGD(0.1) or Adam(), or {mapping}")
    made: UpdateRule = rule
    return made


def check_names(rule: UpdateRule, names: Collection[str]) -> None:
    """Refuse a rule that lacks one for an array or table, or has one for none of these names."""
    named = within(rule, PerArray)
    if named is None:
        return
    for name in names:
        rule_for(rule, name)
    used = {named.chosen(name) for name in names}
    for entry, _ in named.rules:
        if entry not in used and entry != EVERY:
            raise ConfigurationError(
                f"optimizer[{entry!r}]: no array or table has this rule; there are: {listed(names)}"
            )


def frozen(rule: UpdateRule, names: Iterable[str]) -> frozenset[str]:
    """Return the names of arrays and tables that a rule does not train."""
    named = within(rule, PerArray)
    if named is None:
        return frozenset(names if within(rule, Frozen) else ())
    entries = {entry for entry, own in named.rules if within(own, Frozen)}
    return frozenset(name for name in names if entries and named.chosen(name) in entries)
