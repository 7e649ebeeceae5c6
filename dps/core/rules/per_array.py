"""Rules by name: each array and each sparse table has one of its own, or is not trained."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from dps.core.ranges import listed, refused, shown
from dps.core.rules.rule import UpdateRule, by_rows, is_rule, needs_base, rule_for, within
from dps.core.rules.wrappers import clipping_of
from dps.errors import ConfigurationError

Array = np.ndarray

EVERY = "*"
_NONE = frozenset[str]()


@dataclass(frozen=True, slots=True)
class Frozen:
    """The rule of what is not trained: gradients change nothing.

    Workers leave them out of what they send, and a norm that is clipped is that of the others.
    """

    slots: ClassVar[tuple[str, ...]] = ()

    def step(
        self,
        values: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        t: int,
        scale: float,
        out: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Return the values as they are."""
        if out is None:
            return values.copy(), {}
        np.copyto(out, values)
        return out, {}


@dataclass(frozen=True)
class PerArray:
    """A rule for each array and sparse table, by names.

    ``ParameterServer(…, optimizer={"embedding": AdaGrad(0.1), "*": AdamW()})`` makes one.

    Parameters
    ----------
    rules
        Pairs of a name and its rule. In a name, ``*`` stands for any characters, as in
        ``"*.bias"``. What is named in full has that rule; else it is the first that fits, and that
        of ``"*"`` after all others.

    Notes
    -----
    Each slot of optimizer state is as large as the shard, also where only some arrays use it;
    tables have those of their own rule. `Clipped` goes around it, as it is of the whole gradient;
    everything else may go around it or into it.
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
            if per_array_in(rule) is not None:
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
        """Whether any rule has to see whole rows."""
        return any(by_rows(rule) for _, rule in self.rules)

    @property
    def needs_base(self) -> bool:
        """Whether any rule needs the weights that gradients were computed from."""
        return any(needs_base(rule) for _, rule in self.rules)

    def rule_for(self, name: str) -> UpdateRule:
        """The rule of an array or table.

        Raises
        ------
        ConfigurationError
            It has none.
        """
        chosen = self.chosen(name)
        if chosen is None:
            raise ConfigurationError(
                f"optimizer: no rule for {name!r}; name it, or add {EVERY!r} for all that are not "
                "named (Frozen() if they are not to be trained)"
            )
        return self._rules[chosen]

    def chosen(self, name: str) -> str | None:
        """The entry whose rule an array or table has; None: there is none."""
        if name in self._rules:
            return name
        return next((entry for entry, fits in self._patterns if fits.fullmatch(name)), None)

    def step(
        self,
        values: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        t: int,
        scale: float,
        out: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Refuse: without a name there is no telling which rule it is; see `rule_for`."""
        raise ConfigurationError("rules by names take no step with arrays that have no name")

    @cached_property
    def _rules(self) -> dict[str, UpdateRule]:
        return dict(self.rules)

    @cached_property
    def _patterns(self) -> list[tuple[str, re.Pattern[str]]]:
        wild = [name for name in self._rules if EVERY in name and name != EVERY]
        wild += [EVERY] if EVERY in self._rules else []
        return [(n, re.compile(".*".join(map(re.escape, n.split(EVERY))))) for n in wild]


def per_array_in(rule: UpdateRule | None) -> PerArray | None:
    """The rules by names in a rule, whatever is around them; None: there are none."""
    return within(rule, PerArray)


def as_rule(optimizer: object) -> UpdateRule:
    """Return what is given as an update rule: it is one, or a mapping as for `PerArray`.

    Raises
    ------
    ConfigurationError
        It is neither.
    """
    rule: Any = PerArray(tuple(optimizer.items())) if isinstance(optimizer, Mapping) else optimizer
    if not is_rule(rule):
        raise refused(
            "optimizer",
            rule,
            "an update rule such as SGD(0.1) or Adam(), or a mapping of names of arrays to "
            "update rules",
        )
    made: UpdateRule = rule
    return made


def check_names(rule: UpdateRule, names: Collection[str]) -> None:
    """Make sure that all arrays and tables of these names have a rule.

    Raises
    ------
    ConfigurationError
        Something has none, or a rule is that of nothing.
    """
    named = per_array_in(rule)
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
    """Which of these arrays and tables a rule does not train; names that it does not know are not.

    Parameters
    ----------
    names
        Any names.
    """
    named = per_array_in(rule)
    if named is None:
        return frozenset(names) if within(rule, Frozen) else _NONE
    entries = {entry for entry, own in named.rules if within(own, Frozen)}
    return frozenset(name for name in names if named.chosen(name) in entries) if entries else _NONE
