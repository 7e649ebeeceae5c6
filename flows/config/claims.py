"""The claims of an experiment: the comparisons that are fixed before anything runs.

Each names a figure, two strategies, a condition, which way the difference is to go, and the
smallest that is of interest. They are checked against the axes, kept beside the records, and known
by a digest of what is claimed, which each trial's record names: so it can be told whether a claim
was there before the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from flows.config.axes import Combinations
from flows.config.base import Section
from flows.config.errors import refuse, suggest
from flows.config.limits import LONGEST_KEY
from flows.metrics import BY_KEY, COLUMNS, Metric
from flows.metrics.metric import FROM_ZERO
from flows.quoting import listed, quoted

# What a figure is compared with that is a difference already: 0.
NONE_GIVEN = "none-given"
MOST_CLAIMS = 100
DIGEST_LENGTH = 12
# With this as context, an experiment is read whose grid is not the one that was written.
NARROWED = {"narrowed": True}
# What a claim's digest is of: its sentence may be reworded.
DECISIVE = {"metric", "strategy", "against", "condition", "direction", "smallest"}


class ClaimSection(Section):
    """One comparison that is fixed beforehand.

    `claim` says it in words; without, it is said from the rest. The figure `metric` of `strategy`
    minus that of `against`, seed by seed under `condition`, is to be `less` or `more` than 0, or
    `equivalent`: nowhere beyond the margin `smallest`. Of the others `smallest` is the smallest
    difference of interest, in the unit of `dps results --format json`. Without `against` (or with
    the word `none-given`) the figure is compared with 0, for those that are differences already;
    `against: {axis: label}` is for the same strategy under another condition: that with these
    labels in the place of its own. `condition` is a label on another axis, or labels by axis.
    """

    claim: Annotated[str, Field(max_length=LONGEST_KEY)] = ""
    metric: str
    strategy: str
    against: str | dict[str, str] = NONE_GIVEN
    condition: dict[str, str] = Field(default_factory=dict)
    direction: Literal["less", "more", "equivalent"]
    smallest: PositiveFloat

    @field_validator("metric")
    @classmethod
    def _is_a_number(cls, key: str) -> str:
        numbers = [column.key for column in COLUMNS if column.metric is not None]
        if key not in numbers:
            refuse(
                f"{quoted(key)} is no figure; {suggest(key, numbers)}; docs/experiments.md lists "
                "them, by unit"
            )
        return key

    @field_validator("strategy", "against", mode="before")
    @classmethod
    def _label(cls, label: Any, info: ValidationInfo) -> Any:
        if label is None and info.field_name == "against":
            return NONE_GIVEN
        if label is None or isinstance(label, bool):
            refuse(f"YAML reads {label!r} as no text; put the label in quotes")
        return _text(label)

    @field_validator("against", mode="after")
    @classmethod
    def _is_some_condition(cls, against: str | dict[str, str]) -> str | dict[str, str]:
        if against == {}:
            refuse("expected a strategy, or labels by axis, such as {training.workers: 8}")
        return against

    @field_validator("condition", mode="before")
    @classmethod
    def _labels(cls, condition: Any) -> Any:
        if condition is None:
            return {}
        if isinstance(condition, str | int | float) and not isinstance(condition, bool):
            return {"": str(condition)}  # of the axis that has it; see `checked`
        if not isinstance(condition, dict):
            refuse("expected a label on another axis, or labels by axis, such as {faults: kill}")
        return _text(condition)

    @property
    def column(self) -> Metric:
        """What is known of its figure."""
        return BY_KEY[self.metric]

    @property
    def one_sample(self) -> bool:
        """Whether its figure is a difference already."""
        return self.against == NONE_GIVEN

    @property
    def baseline(self) -> str:
        """What the strategy is compared with, in words."""
        if isinstance(self.against, str):
            return self.against
        return ", ".join(f"{axis} {label}" for axis, label in self.against.items())

    @property
    def sides(self) -> tuple[tuple[str, dict[str, str]], ...]:
        """The strategy and the condition that it is about, and those of what it is compared with.

        One for a figure that is a difference already, else two.
        """
        own = (self.strategy, self.condition)
        if isinstance(self.against, dict):
            return own, (self.strategy, self.condition | self.against)
        return (own,) if self.one_sample else (own, (self.against, self.condition))

    @property
    def digest(self) -> str:
        """Digest of what is claimed, whatever the words."""
        said = self.model_dump(mode="json", include=DECISIVE)
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:DIGEST_LENGTH]

    def side_of(self, strategy: str, labels: Mapping[str, str]) -> int | None:
        """Return on which of its sides a trial is, by strategy and labels; None: on neither."""
        for side, (name, condition) in enumerate(self.sides):
            if name == strategy and condition.items() <= labels.items():
                return side
        return None


def checked(
    claims: Sequence[ClaimSection],
    grid: Combinations,
    strategy_axis: str | None,
    experiment: str,
    narrowed: bool = False,
) -> tuple[ClaimSection, ...]:
    """Return claims with the axes of their conditions; refuse what is on no axis, with its key.

    Parameters
    ----------
    claims
        As they were written.
    grid
        The combinations that there are trials of.
    strategy_axis
        The axis of strategies; None where there are no axes, and the experiment is the strategy.
    experiment
        Its name.
    narrowed
        Leave out a claim of what is not in the grid, instead of refusing it.
    """
    if len(claims) > MOST_CLAIMS:
        refuse(f"expected {MOST_CLAIMS} claims at most, got {len(claims):,}", key="claims")
    found: list[ClaimSection] = []
    for index, claim in enumerate(claims):
        try:
            whole = _whole(claim, grid, strategy_axis, experiment, f"claims.{index}")
        except PydanticCustomError:
            if narrowed:
                continue
            raise
        if whole.digest in [other.digest for other in found]:
            refuse("says the same as a claim before it; keep one of them", key=f"claims.{index}")
        found.append(whole)
    return tuple(found)


# -- parts -------------------------------------------------------------------------------------


def _whole(
    claim: ClaimSection, grid: Combinations, strategy_axis: str | None, experiment: str, key: str
) -> ClaimSection:
    strategies = [experiment] if strategy_axis is None else grid.axes[strategy_axis]
    others = {axis: labels for axis, labels in grid.axes.items() if axis != strategy_axis}
    _check_strategies(claim, strategies, key)
    whole = claim.model_copy(update={"condition": _condition(claim, others, key)})
    if isinstance(claim.against, dict):
        _check_other_condition(whole, claim.against, others, key)
    for name, condition in whole.sides:
        wanted = condition | ({} if strategy_axis is None else {strategy_axis: name})
        if not any(wanted == labels for labels in grid):
            refuse(f"the grid leaves out {quoted(name)} under this condition", key=key)
    return whole


def _check_strategies(claim: ClaimSection, strategies: Sequence[str], key: str) -> None:
    if claim.strategy not in strategies:
        known = suggest(claim.strategy, strategies)
        refuse(f"there is no strategy {quoted(claim.strategy)}; {known}", key=f"{key}.strategy")
    if claim.one_sample:
        _check_that_0_says_something(claim, strategies, key)
    if claim.one_sample or isinstance(claim.against, dict):
        return
    if claim.against not in strategies:
        known = suggest(claim.against, [*strategies, NONE_GIVEN])
        refuse(f"there is no strategy {quoted(claim.against)}; {known}", key=f"{key}.against")
    if claim.against == claim.strategy:
        refuse(
            f"is the strategy itself; expected another, or {NONE_GIVEN} for a figure that is a "
            "difference already",
            key=f"{key}.against",
        )


def _check_that_0_says_something(claim: ClaimSection, strategies: Sequence[str], key: str) -> None:
    figure = claim.column
    if claim.direction == "less" and not figure.signed and figure.unit in (*FROM_ZERO, "%"):
        others = [name for name in strategies if name != claim.strategy]
        or_one = f" such as {quoted(others[0])}" if others else ""
        refuse(
            f"without `against` the figure is compared with 0, and {claim.metric} is never less; "
            f"expected a strategy to compare it with{or_one}",
            key=f"{key}.against",
        )


def _condition(
    claim: ClaimSection, others: Mapping[str, Sequence[str]], key: str
) -> dict[str, str]:
    """The label on each of the other axes."""
    given = dict(claim.condition)
    if (bare := given.pop("", None)) is not None:
        having = [axis for axis, labels in others.items() if bare in labels]
        if not having:
            every = [label for labels in others.values() for label in labels]
            refuse(
                f"no axis besides that of strategies has a label {quoted(bare)}; "
                f"{suggest(bare, every)}",
                key=f"{key}.condition",
            )
        if len(having) > 1:
            both = listed(having, MOST_CLAIMS)
            refuse(f"{quoted(bare)} is a label on {both}; say which", key=f"{key}.condition")
        given = {having[0]: bare}
    _check_labels(given, others, f"{key}.condition")
    open_axes = [axis for axis, labels in others.items() if axis not in given and len(labels) > 1]
    if open_axes:
        axis = open_axes[0]
        refuse(
            f"which value on the axis {quoted(axis)}? Expected one of its labels as well, such as "
            f"{{{axis}: {others[axis][0]}}}",
            key=f"{key}.condition",
        )
    return {axis: given.get(axis, labels[0]) for axis, labels in others.items()}


def _check_other_condition(
    claim: ClaimSection, against: Mapping[str, str], others: Mapping[str, Sequence[str]], key: str
) -> None:
    _check_labels(against, others, f"{key}.against")
    for axis, label in against.items():
        if claim.condition[axis] == label:
            refuse(
                "is the condition itself; expected another label",
                key=f"{key}.against.{axis}",
            )


def _check_labels(given: Mapping[str, str], others: Mapping[str, Sequence[str]], key: str) -> None:
    for axis, label in given.items():
        if axis not in others:
            refuse(
                f"there is no axis {quoted(axis)} besides that of strategies; "
                f"{suggest(axis, others)}",
                key=key,
            )
        if label not in others[axis]:
            refuse(
                f"no value is labelled {quoted(label)}; {suggest(str(label), others[axis])}",
                key=f"{key}.{axis}",
            )


def _text(label: Any) -> Any:
    """A label as text, or labels by axis, where YAML has read numbers."""
    if isinstance(label, dict):
        return {str(axis): _text(each) for axis, each in label.items()}
    is_number = isinstance(label, int | float) and not isinstance(label, bool)
    return str(label) if is_number else label
