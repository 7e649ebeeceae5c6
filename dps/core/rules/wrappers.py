"""Rules around another: clipping, weight decay, schedules, staleness and delay compensation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from dps.core import ranges
from dps.core.blocks import ShardLayout, all_finite
from dps.core.rules import rule as rules
from dps.core.rules.rule import OfAnother, UpdateRule, factor, factor_at, needs_base, within
from dps.core.updates import Operation
from dps.errors import ConfigurationError, ShapeMismatch

Array = np.ndarray

STRETCH = 1 << 16  # elements whose squares are made at a time
TINY = 1e-6  # what torch adds to the norm before it divides by it


@dataclass(frozen=True, slots=True)
class Clipped(OfAnother):
    """Another rule, with gradients that workers clip before they push them.

    Parameters
    ----------
    rule
        Any update rule.
    norm
        The largest Euclidean norm of a whole gradient, above 0: of all arrays and rows of one push
        together, as in ``torch.nn.utils.clip_grad_norm_``. A gradient whose norm is larger is
        multiplied by norm / (its norm + 1e-6). None: any.
    value
        The largest magnitude of an element, above 0, as in ``torch.nn.utils.clip_grad_value_``;
        before the norm is taken. None: any.

    Notes
    -----
    Gradients are clipped one by one: the sum of several, as after an outage, may be larger, and so
    may what filters send with what they had withheld before.
    """

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        OfAnother.__post_init__(self)  # super() knows no class that was made anew for its slots
        given = [name for name in ("norm", "value") if getattr(self, name) is not None]
        if not given:
            raise ConfigurationError("Clipped: expected norm=…, value=… or both")
        ranges.positive(self, *given)
        if clipping_of(self.rule) is not None:
            raise ConfigurationError(
                "Clipped: the rule within is clipped already; give norm and value at once"
            )

    def clipped(
        self, parts: Sequence[Array], fresh: Callable[[], Sequence[Array]]
    ) -> Sequence[Array]:
        """Return the parts of one gradient, clipped together.

        Parameters
        ----------
        parts
            Arrays of float32 or float64 of any shape, which are not written to; together they are
            the whole gradient.
        fresh
            Makes arrays like these to put the result into.

        Returns
        -------
        parts
            Those that were given if nothing had to be done, else the fresh ones. If anything is not
            finite, it is those that were given, for whoever checks them.
        """
        value, norm = self.value, self.norm
        now = parts
        if value is not None and not all(_is_within(part, value) for part in parts):
            if not all(all_finite(part) for part in parts):
                return parts
            now = fresh()
            for part, out in zip(parts, now, strict=True):
                np.clip(part, -value, value, out=out)
        if norm is not None:
            found = norm_of(now) + TINY
            if norm < found < math.inf:
                before, now = now, fresh() if now is parts else now
                for part, out in zip(before, now, strict=True):
                    np.multiply(part, norm / found, out=out)
        return now


def clipping_of(rule: UpdateRule | None) -> Clipped | None:
    """How a rule has gradients clipped, whatever is around it; None: not at all."""
    return within(rule, Clipped)


def norm_of(parts: Iterable[Array]) -> float:
    """The Euclidean norm of arrays together; NaN or infinity if something in them is."""
    flat = [part.reshape(-1) for part in parts]
    with np.errstate(over="ignore", invalid="ignore"):
        norm = math.sqrt(sum(_squares(part, 1.0) for part in flat))
        if math.isfinite(norm):
            return norm
        # Squares may be too large where the norm is not.
        largest = max(float(np.abs(part).max()) for part in flat if part.size)
        if not math.isfinite(largest):
            return largest
        return largest * math.sqrt(sum(_squares(part, 1 / largest) for part in flat))


def _squares(flat: Array, scale: float) -> float:
    """The sum of the squares of scaled elements, in float64, with little memory."""
    total = 0.0
    for begin in range(0, flat.size, STRETCH):
        part = np.multiply(flat[begin : begin + STRETCH], scale, dtype=np.float64)
        part *= part
        total += float(part.sum())
    return total


def _is_within(part: Array, most: float) -> bool:
    """Whether no element is larger; what is no number is."""
    flat = part.reshape(-1)
    pieces = (flat[begin : begin + STRETCH] for begin in range(0, flat.size, STRETCH))
    return all(bool((np.abs(piece) <= most).all()) for piece in pieces)


@dataclass(frozen=True, slots=True)
class DelayCompensated(OfAnother):
    """Another rule, with gradients that are corrected for what they have missed.

    g + λ·g⊙g⊙(w − w'), where w' are the weights that g was computed from and w the present ones: a
    step of Taylor's series in which λ·g⊙g stands for the second derivative ("Asynchronous
    Stochastic Gradient Descent with Delay Compensation", Zheng et al., ICML 2017, section 3, with a
    constant λ). Gradients that are summed into one step are each corrected to the weights before
    it.

    Parameters
    ----------
    rule
        Any update rule, `StalenessAware` included.
    strength
        λ, 0 or above, in units of one over the loss.

    Notes
    -----
    Each push carries the weights as well, whatever filters do to its gradient. A worker that has
    read no weights yet sends none, and its gradient is taken as it is; so are elements whose
    correction is too large for their dtype.
    """

    strength: float

    def __post_init__(self) -> None:
        OfAnother.__post_init__(self)  # super() knows no class that was made anew for its slots
        ranges.not_negative(self, "strength")

    @property
    def needs_base(self) -> bool:
        """Gradients have to come with the weights that they were computed from."""
        return True

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
    """Return the operation with its gradient corrected to these values of the shard.

    One that carries no weights, or meets a rule that has no use for them, stays as it is.

    Raises
    ------
    ShapeMismatch
        Gradient and weights do not fit.
    """
    if op.base is None or not rules.needs_base(rule):
        return op
    check_base(op)
    assert op.gradient is not None
    present = layout.taken(values, op.pieces)
    if present.nbytes != op.gradient.nbytes:
        size = op.gradient.nbytes
        raise ShapeMismatch(f"update {op.id}: {size} bytes of gradient, expected {present.nbytes}")
    gradient, at = np.empty_like(op.gradient), 0
    chosen = [layout.pieces[i] for i in op.pieces] if op.pieces else layout.pieces
    for piece in chosen:
        part = slice(at, at + piece.block.nbytes)
        at = part.stop
        own = rules.rule_for(rule, piece.block.name)
        if not rules.needs_base(own):
            gradient[part] = op.gradient[part]
            continue
        correct: Callable[..., Array] = getattr(own, "compensated")  # noqa: B009 - not of every rule
        three = (buffer[part].view(piece.block.dtype) for buffer in (present, op.gradient, op.base))
        gradient[part].view(piece.block.dtype)[:] = correct(*three)
    return replace(op, gradient=gradient, base=None)


def check_base(op: Operation) -> None:
    """Refuse weights of another size than the gradient; raises `ShapeMismatch`."""
    if op.base is not None and op.gradient is not None and op.base.nbytes != op.gradient.nbytes:
        raise ShapeMismatch(
            f"update {op.id}: {op.base.nbytes} bytes of weights, expected {op.gradient.nbytes}"
        )


@dataclass(frozen=True, slots=True)
class WeightDecay(OfAnother):
    """Another rule, with weight decay in its gradient: g ← g + λ·w.

    What torch's optimizers do with their argument ``weight_decay`` (but for `AdamW`, which is a
    rule of its own): the gradient of λ/2·Σw², which goes through momentum and all else that the
    rule makes of gradients.

    Parameters
    ----------
    rule
        Any update rule.
    strength
        λ, 0 or above, in units of the loss per squared unit of weight.

    Notes
    -----
    It is done on the server, with the weights that the gradient meets. Rows of sparse tables decay
    when they are pushed to, all others stay as they are. Gradients that are summed into one step
    decay the weights once.
    """

    strength: float

    def __post_init__(self) -> None:
        OfAnother.__post_init__(self)  # super() knows no class that was made anew for its slots
        ranges.not_negative(self, "strength")

    def step(
        self,
        values: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        t: int,
        scale: float,
        out: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Return what the rule makes of the gradient with the decay in it."""
        whole = np.multiply(values, self.strength)
        whole += gradient
        return self.rule.step(values, whole, slots, t, scale, out)


class Schedule(Protocol):
    """How the learning rate depends on the version of the shard."""

    def factor(self, version: int) -> float:
        """Return the factor on the learning rate, 0 or above.

        Parameters
        ----------
        version
            How many updates the shard had applied before this step, from 0.
        """
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """The learning rate as it is."""

    def factor(self, version: int) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True, slots=True)
class StepDecay:
    """The learning rate is multiplied by the same number again and again: ``StepLR`` of torch.

    Parameters
    ----------
    every
        After how many updates of the shard, at least 1.
    by
        By what, in (0, 1] as a rule; above 0.
    """

    every: int
    by: float = 0.1

    def __post_init__(self) -> None:
        ranges.count(self, "every", 1, "updates")
        ranges.positive(self, "by")

    def factor(self, version: int) -> float:
        """Return `by` to the power of how often it was time."""
        return float(self.by ** (version // self.every))


@dataclass(frozen=True, slots=True)
class Cosine:
    """The learning rate falls along half a cosine, and stays at its end.

    least + (1 − least)·(1 + cos(π·v / updates)) / 2 for a version v up to `updates`, as of
    ``CosineAnnealingLR`` of torch; that one rises again afterwards.

    Parameters
    ----------
    updates
        After how many updates of the shard it is at its end, at least 1.
    least
        Which part of the learning rate is left then, in [0, 1).
    """

    updates: int
    least: float = 0.0

    def __post_init__(self) -> None:
        ranges.count(self, "updates", 1, "updates")
        ranges.fraction(self, "least")

    def factor(self, version: int) -> float:
        """Return the factor at this version."""
        done = min(version / self.updates, 1.0)
        return self.least + (1 - self.least) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The learning rate rises evenly to its full size; another schedule follows.

    `SequentialLR` of torch, with `LinearLR` first.

    Parameters
    ----------
    updates
        After how many updates of the shard it has its full size, at least 1.
    then
        What follows; it counts from there on.
    start
        With which part of the learning rate it begins, in [0, 1).
    """

    updates: int
    then: Schedule = Constant()
    start: float = 0.0

    def __post_init__(self) -> None:
        ranges.count(self, "updates", 1, "updates")
        ranges.fraction(self, "start")
        _require_schedule(self, "then", self.then)

    def factor(self, version: int) -> float:
        """Return the factor at this version."""
        if version >= self.updates:
            return self.then.factor(version - self.updates)
        return self.start + (1 - self.start) * version / self.updates


@dataclass(frozen=True, slots=True)
class Scheduled(OfAnother):
    """Another rule, with a learning rate that follows a schedule.

    Parameters
    ----------
    rule
        Any update rule; the schedule's factor is one on its learning rate.
    schedule
        `Constant`, `StepDecay`, `Cosine`, `WarmUp`, or one of your own.

    Notes
    -----
    Time is the version of the shard: how many updates it has applied, of all workers together. An
    update that touches some of the shards only is one for these. Gradients that are summed into one
    step, as after an outage, are one step at the rate of the first, and count as many.
    """

    schedule: Schedule

    def __post_init__(self) -> None:
        OfAnother.__post_init__(self)  # super() knows no class that was made anew for its slots
        _require_schedule(self, "schedule", self.schedule)

    def factor_at(self, version: int) -> float:
        """The schedule's factor; one of the rule's own comes on top."""
        return self.schedule.factor(version) * factor_at(self.rule, version)


def _require_schedule(owner: object, field: str, schedule: object) -> None:
    if isinstance(schedule, type) or not hasattr(schedule, "factor") or hasattr(schedule, "step"):
        raise ranges.refused(
            f"{type(owner).__name__}: {field}",
            schedule,
            "a schedule such as Cosine(1000)",
        )


@dataclass(frozen=True, slots=True)
class StalenessAware(OfAnother):
    """Another rule, at its learning rate divided by how stale the gradient is.

    The learning rate of a step is η / max(1, s), where s is the version of the shard before the
    step less the one that the gradient was computed from ("Staleness-aware Async-SGD", Zhang,
    Gupta, Lian and Liu, IJCAI 2016). Where gradients are summed into one step, s is their mean. A
    factor of the replay policy comes on top.

    Parameters
    ----------
    rule
        Any update rule.

    Notes
    -----
    It is meant for `ASP` and `SSP`. Under `BSP` the updates of a round are applied one after the
    other, so that each is as stale as its place in the round.
    """

    def __post_init__(self) -> None:
        OfAnother.__post_init__(self)  # super() knows no class that was made anew for its slots
        if needs_base(self.rule):
            raise ConfigurationError(
                "StalenessAware: delay compensation comes first; write DelayCompensated("
                "StalenessAware(...), strength)"
            )

    def factor(self, staleness: float) -> float:
        """The factor on the learning rate; one of the rule's own comes on top."""
        return factor(self.rule, staleness) / max(1.0, staleness)
