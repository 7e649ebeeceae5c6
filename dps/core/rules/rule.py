"""The interface of server-side update rules, and SGD, momentum, AdaGrad, Adam and AdamW.

A rule is a pure function of old arrays to new arrays. It never writes into what it is given: a
shard's state is replaced, not changed, so a snapshot is a reference and no reader sees half a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from dps.core.ranges import Checked, Fraction, NotNegative, Visible, refused

Array = np.ndarray
Slots = Mapping[str, Array]
Out = Array | None
Stepped = tuple[Array, dict[str, Array]]  # new values, and the new optimizer state
R = TypeVar("R")


class UpdateRule(Protocol):
    """How a gradient changes parameters.

    A rule treats each element separately, and a step does not change the rule itself: large
    parameters are stepped in chunks, on several threads at a time. It may have more attributes:

    - ``by_rows = True``: it gets whole rows of the parameter arrays, as 2-D arrays, and no row is
      divided between shards.
    - ``factor(staleness)``: a factor on the learning rate of a step, by the number of updates that
      its gradient has missed; ``factor_at(version)``: one by the version of the shard.
    - ``needs_base = True``: gradients come with the weights that they were computed from, and first
      pass through ``compensated(values, gradient, base)``.
    - ``per_array = True``: each array and table has the rule that ``rule_for(name)`` returns.
    """

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the arrays of optimizer state that each parameter array has."""
        ...

    def step(
        self, values: Array, gradient: Array, slots: Slots, t: int, scale: float, out: Out = None
    ) -> Stepped:
        """Return the new values and the new optimizer state after one step.

        Parameters
        ----------
        values, gradient
            Arrays of equal shape and dtype (float32 or float64): 1-D, some elements of one or more
            parameter arrays; for a rule by rows 2-D, some rows of one parameter array.
        slots
            Optimizer state: for each name in `slots`, an array like `values`; zeros at first.
        t
            The number of this step, from 1.
        scale
            Factor on the learning rate; replay policies and staleness reduce it below 1.
        out
            Where to put the new values; None: in a fresh array.
        """
        ...


def by_rows(rule: UpdateRule) -> bool:
    """Whether the rule needs whole rows: elements of an array with the same first index."""
    return bool(getattr(rule, "by_rows", False))


def factor(rule: UpdateRule, staleness: float) -> float:
    """The rule's own factor on the learning rate for a gradient of this staleness."""
    return float(rule.factor(staleness)) if hasattr(rule, "factor") else 1.0


def factor_at(rule: UpdateRule, version: int) -> float:
    """The rule's own factor on the learning rate at a version of the shard."""
    return float(rule.factor_at(version)) if hasattr(rule, "factor_at") else 1.0


def learning_rate_at(rule: UpdateRule, version: int) -> float | None:
    """The learning rate at a version of the shard, without staleness; None if arrays differ."""
    own: UpdateRule | None = rule
    while own is not None and not hasattr(own, "learning_rate"):
        own = getattr(own, "rule", None)
    rate = getattr(own, "learning_rate", None)
    return float(rate) * factor_at(rule, version) if isinstance(rate, int | float) else None


def needs_base(rule: UpdateRule) -> bool:
    """Whether gradients have to come with the weights that they were computed from."""
    return bool(getattr(rule, "needs_base", False))


def is_per_array(rule: UpdateRule) -> bool:
    """Whether each array has its own rule (see `dps.core.rules.wrappers`)."""
    return bool(getattr(rule, "per_array", False))


def rule_for(rule: UpdateRule, name: str) -> UpdateRule:
    """The rule of an array or table of this name."""
    if not is_per_array(rule):
        return rule
    chosen: UpdateRule = getattr(rule, "rule_for")(name)  # noqa: B009 - not of every rule
    return chosen


def within(rule: UpdateRule | None, kind: type[R]) -> R | None:
    """Return the outermost rule of a kind in nested rules, or None."""
    while rule is not None and not isinstance(rule, kind):
        rule = getattr(rule, "rule", None)
    return rule


def is_rule(choice: object) -> bool:
    """Whether an object is an update rule, and not a class."""
    # An optimizer of torch has a `step` as well.
    step = getattr(choice, "step", None)
    return not isinstance(choice, type) and callable(step) and hasattr(choice, "slots")


@dataclass(frozen=True)
class Wrapper(Checked):
    """Base of rules around another `rule`, which has all that they do not override."""

    rule: UpdateRule

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.rule, type(self)) or not is_rule(self.rule):
            what = f"{type(self).__name__}: rule"
            raise refused(what, self.rule, "another update rule such as SGD(0.1)")

    def __getattr__(self, name: str) -> Any:
        # Such as `by_rows`, `needs_base`, `per_array` and `factor`.
        if name == "rule":  # an object that is being unpickled has none yet
            raise AttributeError(name)
        return getattr(self.rule, name)

    @property
    def slots(self) -> tuple[str, ...]:
        """Those of the rule."""
        return self.rule.slots

    def rule_for(self, name: str) -> UpdateRule:
        """The same around the rule of an array or table of this name."""
        return replace(self, rule=rule_for(self.rule, name))

    def step(
        self, values: Array, gradient: Array, slots: Slots, t: int, scale: float, out: Out = None
    ) -> Stepped:
        """Return the step of the rule."""
        return self.rule.step(values, gradient, slots, t, scale, out)


@dataclass(frozen=True, slots=True)
class SGD(Checked):
    """Plain stochastic gradient descent: w ← w − η·g.

    Parameters
    ----------
    learning_rate
        η, 0 or above.

    Examples
    --------
    >>> values, _ = SGD(0.1).step(np.ones(2), np.array([1.0, 2.0]), {}, t=1, scale=1.0)
    >>> values
    array([0.9, 0.8])
    """

    learning_rate: NotNegative  # 0 learns nothing: for comparison
    slots: ClassVar[tuple[str, ...]] = ()

    def step(
        self, values: Array, gradient: Array, slots: Slots, t: int, scale: float, out: Out = None
    ) -> Stepped:
        """Return the new values; there is no optimizer state."""
        new = np.multiply(gradient, self.learning_rate * scale, out=out)
        np.subtract(values, new, out=new)
        return new, {}


@dataclass(frozen=True, slots=True)
class Momentum(Checked):
    """SGD with momentum, as in torch: m ← μ·m + g; w ← w − η·m.

    Parameters
    ----------
    learning_rate
        η, 0 or above.
    momentum
        μ, in [0, 1).
    nesterov
        Nesterov's form: w ← w − η·(g + μ·m).

    Examples
    --------
    >>> rule, zeros = Momentum(0.1, nesterov=True), np.zeros(1)
    >>> rule.step(zeros, np.ones(1), {"momentum": zeros}, t=1, scale=1.0)[0]
    array([-0.19])
    """

    learning_rate: NotNegative
    momentum: Fraction = 0.9
    nesterov: bool = False
    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    def step(
        self, values: Array, gradient: Array, slots: Slots, t: int, scale: float, out: Out = None
    ) -> Stepped:
        """Return the new values and the new momentum."""
        momentum = np.multiply(slots["momentum"], self.momentum)
        momentum += gradient
        direction: Array = momentum
        if self.nesterov:
            direction = np.multiply(momentum, self.momentum)
            direction += gradient
        new = np.multiply(direction, self.learning_rate * scale, out=out)
        np.subtract(values, new, out=new)
        return new, {"momentum": momentum}


@dataclass(frozen=True, slots=True)
class AdaGrad(Checked):
    """AdaGrad with a diagonal matrix (Duchi, Hazan and Singer 2011), as in torch by default.

    s ← s + g²; w ← w − η·g / (√s + ε).

    Parameters
    ----------
    learning_rate
        η, 0 or above: how far an element goes in its first step, for a gradient of any size.
    eps
        ε, 1.2e-38 or above, in the unit of the gradient: keeps elements in place that had none yet.

    Examples
    --------
    >>> zeros = np.zeros(2)
    >>> AdaGrad(0.5).step(zeros, np.array([1.0, -9.0]), {"squares": zeros}, t=1, scale=1.0)[0]
    array([-0.5,  0.5])
    """

    learning_rate: NotNegative = 0.01
    eps: Visible = 1e-10
    kind: ClassVar[str] = "adagrad"
    slots: ClassVar[tuple[str, ...]] = ("squares",)

    def step(
        self, values: Array, gradient: Array, slots: Slots, t: int, scale: float, out: Out = None
    ) -> Stepped:
        """Return the new values and the new sum of squares of the gradient."""
        squares = np.multiply(gradient, gradient)
        squares += slots["squares"]
        divisor = np.sqrt(squares)
        divisor += self.eps
        new = np.multiply(gradient, self.learning_rate * scale, out=out)
        new /= divisor
        np.subtract(values, new, out=new)
        return new, {"squares": squares}


@dataclass(frozen=True, slots=True)
class Adam(Checked):
    """Adam with bias correction (Kingma and Ba 2015), as in torch with its default settings.

    Parameters
    ----------
    learning_rate
        Step size, 0 or above.
    beta1, beta2
        Decay of the running mean of the gradient, and of its square.
    eps
        Added to the root of the mean square.

    Examples
    --------
    >>> Adam(0.01).slots
    ('mean', 'square')
    """

    learning_rate: NotNegative = 0.001
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: Visible = 1e-8
    slots: ClassVar[tuple[str, ...]] = ("mean", "square")

    def step(
        self, values: Array, gradient: Array, slots: Slots, t: int, scale: float, out: Out = None
    ) -> Stepped:
        """Return the new values and the new running mean and mean square of the gradient."""
        scratch = np.multiply(gradient, 1 - self.beta1)
        mean = np.multiply(slots["mean"], self.beta1)
        mean += scratch
        np.multiply(gradient, gradient, out=scratch)
        scratch *= 1 - self.beta2
        square = np.multiply(slots["square"], self.beta2)
        square += scratch
        np.sqrt(square, out=scratch)
        scratch *= 1 / float(np.sqrt(1 - self.beta2**t))
        scratch += self.eps
        np.divide(mean, scratch, out=scratch)
        scratch *= self.learning_rate * scale / (1 - self.beta1**t)
        new = np.subtract(values, scratch, out=scratch if out is None else out)
        return new, {"mean": mean, "square": square}


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, as in torch with its default settings.

    w ← (1 − η·λ)·w, and then the step of `Adam` (Loshchilov and Hutter 2019, algorithm 2, where
    torch has λ multiplied by the learning rate).

    Parameters
    ----------
    weight_decay
        λ, 0 or above, in units of the inverse of the learning rate. A factor on the learning rate
        is one on the decay as well.

    Examples
    --------
    >>> AdamW(weight_decay=0.1).kind
    'adamw'
    """

    weight_decay: NotNegative = 0.01
    kind: ClassVar[str] = "adamw"

    def step(
        self, values: Array, gradient: Array, slots: Slots, t: int, scale: float, out: Out = None
    ) -> Stepped:
        """Decay the weights and take the step of `Adam`."""
        kept = 1 - self.learning_rate * scale * self.weight_decay
        decayed = np.multiply(values, kept, out=out)
        return Adam.step(self, decayed, gradient, slots, t, scale, decayed)
