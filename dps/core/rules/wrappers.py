"""Rules around others: clipping, decay, schedules, staleness, compensation; and rules by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np

from dps.core.blocks import ShardLayout, all_finite
from dps.core.ranges import Checked, Fraction, NotNegative, Positive, listed, refused, whole_from
from dps.core.rules.rule import (
    Array,
    Out,
    Slots,
    Stepped,
    UpdateRule,
    Wrapper,
    by_rows,
    factor,
    factor_at,
    is_rule,
    needs_base,
    rule_for,
    within,
)
from dps.core.updates import Operation
from dps.errors import ConfigurationError, ShapeMismatch

EVERY = "*"
STRETCH = 1 << 16  # elements that are read at a time
Updates = Annotated[int, whole_from(1, "updates")]
WAITING = "accumulated"
TINY = 1e-6  # torch adds it to the norm before it divides by it


@dataclass(frozen=True)
class Clipped(Wrapper):
    """Another rule, with gradients that workers clip before they push them.

    A sum of several gradients, as after an outage or by filters, may be larger.

    Parameters
    ----------
    norm
        The largest Euclidean norm of a whole gradient, above 0: of all arrays and rows of one push
        together, as in ``torch.nn.utils.clip_grad_norm_``. A gradient whose norm is larger is
        multiplied by norm / (its norm + 1e-6). None: any.
    value
        The largest magnitude of an element, above 0, as in ``torch.nn.utils.clip_grad_value_``;
        before the norm is taken. None: any.

    Examples
    --------
    >>> Clipped(SGD(0.1), norm=1.0).slots
    ()
    """

    norm: Positive | None = None
    value: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm is None and self.value is None:
            raise ConfigurationError("Clipped: expected norm=…, value=… or both")
        if within(self.rule, Clipped) is not None:
            raise ConfigurationError(
                "Clipped: the inner rule is already Clipped; give norm and value together"
            )

    @np.errstate(over="ignore")  # a limit may be too large for float32
    def clipped(
        self, parts: Sequence[Array], fresh: Callable[[], Sequence[Array]]
    ) -> Sequence[Array]:
        """Return the parts of one gradient, clipped together in `fresh` ones if they have to be."""
        value, norm = self.value, self.norm
        now = parts
        # NaN is not within the limit either.
        if value is not None and not all((np.abs(s) <= value).all() for s in _stretches(parts)):
            if not all(all_finite(part) for part in parts):
                return parts
            now = fresh()
            for part, out in zip(parts, now, strict=True):
                np.clip(part, -value, value, out=out)
        if norm is not None:
            length = norm_of(now) + TINY
            if norm < length < math.inf:
                before, now = now, fresh() if now is parts else now
                for part, out in zip(before, now, strict=True):
                    np.multiply(part, norm / length, out=out)
        return now


def norm_of(parts: Sequence[Array]) -> float:
    """The Euclidean norm of arrays together; NaN or infinity if one of them is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        norm = math.sqrt(_squares(parts, 1.0))
        if math.isfinite(norm):
            return norm
        # Squares may be too large where the norm is not.
        largest = max(float(np.abs(part).max()) for part in parts if part.size)
        if not math.isfinite(largest):
            return largest
        return largest * math.sqrt(_squares(parts, 1 / largest))


def _squares(parts: Iterable[Array], scale: float) -> float:
    scaled = (np.multiply(stretch, scale, dtype=np.float64) for stretch in _stretches(parts))
    return sum(float(np.square(stretch, out=stretch).sum()) for stretch in scaled)


def _stretches(parts: Iterable[Array]) -> Iterator[Array]:
    # Short pieces, so that copies of them take little memory.
    for flat in (part.reshape(-1) for part in parts):
        yield from (flat[begin : begin + STRETCH] for begin in range(0, flat.size, STRETCH))


@dataclass(frozen=True)
class DelayCompensated(Wrapper):
    """Another rule, with gradients that are corrected for the updates that they have missed.

    g + λ·g⊙g⊙(w − w'), where w' are the weights that g was computed from and w the present ones: a
    step of Taylor's series in which λ·g⊙g stands for the second derivative (Zheng et al., ICML
    2017, section 3, with a constant λ). Each push carries its weights as well. Gradients
    before a worker's first read of weights, and elements that would overflow, are not corrected.

    Parameters
    ----------
    strength
        λ, 0 or above, in units of one over the loss.

    Examples
    --------
    >>> one = np.ones(1)
    >>> DelayCompensated(SGD(0.1), 0.5).compensated(values=3 * one, gradient=2 * one, base=one)
    array([6.])
    """

    strength: NotNegative
    needs_base: ClassVar[bool] = True

    def compensated(self, values: Array, gradient: Array, base: Array) -> Array:
        """Return the corrected gradient; three 1-D arrays of equal shape and dtype."""
        with np.errstate(over="ignore", invalid="ignore"):
            new: Array = np.subtract(values, base)
            new *= gradient
            new *= gradient
            new *= self.strength
            new += gradient
        return new if all_finite(new) else np.where(np.isfinite(new), new, gradient)


def compensated(layout: ShardLayout, rule: UpdateRule, values: Array, op: Operation) -> Operation:
    """Return the operation with its gradient corrected to these values, if it carries weights."""
    if op.base is None or not needs_base(rule):
        return op
    check_base(op)
    assert op.gradient is not None
    present = layout.taken(values, op.pieces)
    if present.nbytes != op.gradient.nbytes:
        size = op.gradient.nbytes
        raise ShapeMismatch(f"update {op.id}: {size} bytes of gradient, expected {present.nbytes}")
    gradient = np.empty_like(op.gradient)
    for piece, part in layout.packed(op.pieces):
        own: Any = rule_for(rule, piece.block.name)
        if not needs_base(own):
            gradient[part] = op.gradient[part]
            continue
        three = (buffer[part].view(piece.block.dtype) for buffer in (present, op.gradient, op.base))
        gradient[part].view(piece.block.dtype)[:] = own.compensated(*three)
    return op._replace(gradient=gradient, base=None)


def check_base(op: Operation) -> None:
    """Refuse weights of another size than the gradient."""
    if op.base is not None and op.gradient is not None and op.base.nbytes != op.gradient.nbytes:
        raise ShapeMismatch(
            f"update {op.id}: {op.base.nbytes} bytes of weights, expected {op.gradient.nbytes}"
        )


@dataclass(frozen=True)
class WeightDecay(Wrapper):
    """Another rule, with weight decay in its gradient: g ← g + λ·w.

    As the argument ``weight_decay`` of torch's optimizers: the gradient of λ/2·Σw² is added on the
    server, once in each step, before momentum and the like. Rows of sparse tables decay when they
    are pushed to. For decoupled decay see `AdamW`.

    Parameters
    ----------
    strength
        λ, 0 or above, in units of the loss per squared unit of weight.

    Examples
    --------
    >>> rule = WeightDecay(SGD(0.1), strength=0.5)
    >>> rule.step(np.ones(1), np.zeros(1), {}, t=1, scale=1.0)[0]
    array([0.95])
    """

    strength: NotNegative

    def step(
        self, values: Array, gradient: Array, slots: Slots, t: int, scale: float, out: Out = None
    ) -> Stepped:
        """Return the step of the rule with the decay in the gradient."""
        whole = np.multiply(values, self.strength)
        whole += gradient
        return self.rule.step(values, whole, slots, t, scale, out)


@dataclass(frozen=True)
class Accumulated(Wrapper):
    """Another rule, which takes one step with the mean of several gradients.

    If `updates` is the number of workers, under `BSP` that is the mean of a round; under `ASP`
    gradients are buffered, as by FedBuff (Nguyen et al., AISTATS 2022), but with equal weights. The
    step has the learning rate of its last gradient. If fewer than `updates` gradients remain at the
    end of a training, they are never applied.

    The shard counts its steps, so each gradient has to be of all arrays, and sparse tables are
    refused. Gradients that are summed before (`Chain(aggregate=…)`, and after an outage) count as
    one.

    Parameters
    ----------
    updates
        How many gradients a step takes, at least 1.

    Examples
    --------
    >>> rule, zeros = Accumulated(SGD(1.0), updates=2), np.zeros(1)
    >>> values, slots = rule.step(zeros, np.full(1, 3.0), {WAITING: zeros}, t=1, scale=1.0)
    >>> rule.step(values, np.full(1, 5.0), slots, t=2, scale=1.0)[0]
    array([-4.])
    """

    updates: Updates

    def __post_init__(self) -> None:
        super().__post_init__()
        if within(self.rule, Accumulated) is not None:
            raise ConfigurationError("Accumulated: the inner rule is already Accumulated")

    @property
    def slots(self) -> tuple[str, ...]:
        """Those of the rule, and the sum of gradients that wait for others."""
        return (WAITING, *self.rule.slots)

    def step(
        self, values: Array, gradient: Array, slots: Slots, t: int, scale: float, out: Out = None
    ) -> Stepped:
        """Return the step of the rule with the last gradient, and the same values before it."""
        total, own = slots[WAITING] + gradient, {name: slots[name] for name in self.rule.slots}
        if t % self.updates:
            return np.positive(values, out=out), {WAITING: total, **own}
        total /= self.updates
        new, own = self.rule.step(values, total, own, t // self.updates, scale, out)
        return new, {WAITING: np.zeros_like(total), **own}


class Schedule(Protocol):
    """How the learning rate depends on the version of the shard."""

    def factor(self, version: int) -> float:
        """Return the factor on the learning rate, 0 or above.

        `version` is the number of updates that the shard has applied before this step.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepDecay(Checked):
    """Multiply the learning rate by a number at regular intervals, as torch's ``StepLR`` does.

    Parameters
    ----------
    every
        The interval in updates of the shard, at least 1.
    by
        The number, above 0.

    Examples
    --------
    >>> [StepDecay(every=100, by=0.5).factor(version) for version in (99, 100, 200)]
    [1.0, 0.5, 0.25]
    """

    every: Updates
    by: Positive = 0.1

    def factor(self, version: int) -> float:
        """Return `by` to the power of the number of whole intervals."""
        return float(self.by ** (version // self.every))


@dataclass(frozen=True, slots=True)
class Cosine(Checked):
    """Lower the learning rate along half a cosine; it stays at its end.

    The factor is least + (1 − least)·(1 + cos(π·v / updates)) / 2 for a version v up to `updates`,
    as for torch's ``CosineAnnealingLR``, which rises again afterwards.

    Parameters
    ----------
    updates
        After how many updates of the shard it is at its end, at least 1.
    least
        The factor at its end, in [0, 1).

    Examples
    --------
    >>> [Cosine(1000, least=0.1).factor(version) for version in (0, 1000, 5000)]
    [1.0, 0.1, 0.1]
    """

    updates: Updates
    least: Fraction = 0.0

    def factor(self, version: int) -> float:
        """Return the factor at this version."""
        done = min(version / self.updates, 1.0)
        return self.least + (1 - self.least) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True, slots=True)
class WarmUp(Checked):
    """Raise the learning rate linearly to its full size, before another schedule.

    Parameters
    ----------
    updates
        After how many updates of the shard it has its full size, at least 1.
    then
        The schedule that follows, which counts versions from there; None: the full size.
    start
        The first factor, in [0, 1).

    Examples
    --------
    >>> [WarmUp(10, then=StepDecay(100)).factor(version) for version in (0, 5, 10, 110)]
    [0.0, 0.5, 1.0, 0.1]
    """

    updates: Updates
    then: Schedule | None = None
    start: Fraction = 0.0

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.then is not None:
            _require_schedule(self, "then", self.then)

    def factor(self, version: int) -> float:
        """Return the factor at this version."""
        if version >= self.updates:
            return 1.0 if self.then is None else self.then.factor(version - self.updates)
        return self.start + (1 - self.start) * version / self.updates


@dataclass(frozen=True)
class Scheduled(Wrapper):
    """Another rule, with a learning rate that follows a schedule.

    A schedule follows the version of the shard: the number of updates of all workers that it has
    applied. Gradients that are summed into one step, as after an outage, count one by one, and the
    step has the rate of the first.

    Parameters
    ----------
    schedule
        The factor on its learning rate: `StepDecay`, `Cosine`, `WarmUp` or your own.

    Examples
    --------
    >>> Scheduled(SGD(0.1), Cosine(1000)).factor_at(version=1000)
    0.0
    """

    schedule: Schedule

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_schedule(self, "schedule", self.schedule)

    def factor_at(self, version: int) -> float:
        """The schedule's factor, times that of the rule."""
        return self.schedule.factor(version) * factor_at(self.rule, version)


def _require_schedule(owner: object, field: str, schedule: object) -> None:
    if isinstance(schedule, type) or not hasattr(schedule, "factor") or hasattr(schedule, "step"):
        what = f"{type(owner).__name__}: {field}"
        raise refused(what, schedule, "a schedule such as Cosine(1000)")


@dataclass(frozen=True)
class StalenessAware(Wrapper):
    """Another rule, at its learning rate divided by the staleness of the gradient.

    η / max(1, s), where s is the version of the shard before the step less the one that the
    gradient was computed from (Zhang et al., IJCAI 2016). For gradients that are summed into one
    step, s is their mean. For `ASP` and `SSP`: under `BSP`, an update is as stale as its place in
    the round.

    >>> StalenessAware(SGD(0.1)).factor(staleness=4)
    0.25
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if needs_base(self.rule):
            raise ConfigurationError(
                "StalenessAware: delay compensation must be outermost; write DelayCompensated("
                "StalenessAware(...), strength)"
            )

    def factor(self, staleness: float) -> float:
        """Return 1 / max(1, staleness), times the factor of the rule."""
        return factor(self.rule, staleness) / max(1.0, staleness)


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

    ``ParameterServer(…, optimizer={"embedding": AdaGrad(0.1), "*": AdamW()})`` makes one. Each slot
    of optimizer state is as large as the shard, also if only some arrays use it. Put `Clipped`
    around it, because it clips whole gradients; other wrappers may be inside or outside.

    Parameters
    ----------
    rules
        Pairs of a name and its rule. In a name, ``*`` stands for any characters, as in
        ``"*.bias"``. A full name goes before patterns, and ``"*"`` after all others; otherwise the
        first that matches counts.

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
                raise refused("optimizer: name", name, "the name of an array, as text")
            if not is_rule(rule):
                raise refused(f"optimizer[{name!r}]", rule, "an update rule such as SGD(0.1)")
            if within(rule, Clipped) is not None:
                raise ConfigurationError(
                    f"optimizer[{name!r}]: clipping applies to the whole gradient; put Clipped(…) "
                    "around all rules: Clipped(PerArray((…)), norm=…)"
                )
            if within(rule, PerArray) is not None:
                raise ConfigurationError(f"optimizer[{name!r}]: PerArray cannot be nested")
        names = [name for name, _ in self.rules]
        if not names:
            raise ConfigurationError("optimizer: expected a rule for at least one array")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigurationError(f"optimizer[{twice!r}] is given twice; keep one of them")

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
                f"optimizer: no rule for {name!r}; add one, or add {EVERY!r} for all other arrays "
                "(Frozen() to leave them untrained)"
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
        """Refuse, because the rule depends on the name (see `rule_for`)."""
        raise ConfigurationError("PerArray needs the names of the arrays")

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
                f"optimizer[{entry!r}]: no such array or table; expected one of {listed(names)}"
            )


def frozen(rule: UpdateRule, names: Iterable[str]) -> frozenset[str]:
    """Return the names of arrays and tables that a rule does not train."""
    named = within(rule, PerArray)
    if named is None:
        return frozenset(names if within(rule, Frozen) else ())
    entries = {entry for entry, own in named.rules if within(own, Frozen)}
    return frozenset(name for name in names if entries and named.chosen(name) in entries)
