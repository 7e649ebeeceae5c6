"""The claims of an experiment: comparisons that are fixed before any trial runs.

Each names a figure, two strategies, a condition, the direction of the difference, and the smallest
difference of interest. Claims are checked against the axes and stored beside the records. Each
trial's record lists the digests of the claims, which shows whether a claim was fixed before the
data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from flows.config.axes import check_labels, label_texts
from flows.config.errors import check_known, refuse
from flows.config.sections import Section
from flows.metrics import BY_KEY, METRICS, Metric
from flows.metrics.metric import FROM_ZERO
from flows.quoting import first_few, quoted

if TYPE_CHECKING:
    from flows.config.experiment import ExperimentConfig

# What a figure is compared with that is a difference already: 0.
NONE_GIVEN = "none-given"
SMALLEST = {
    "anyOf": [
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "string", "pattern": r"^[0-9.]+%$"},
    ]
}
DIGEST_LENGTH = 12
Label = str | int | float
# A label, or labels by axis, where YAML may have read numbers.
Text = BeforeValidator(label_texts, json_schema_input_type=Label | dict[str, Label])


class ClaimSection(Section):
    """A comparison that is stated before the experiment runs.

    The claim is about the paired difference of `metric` between `strategy` and `against`. Without
    `against`, a metric that is already a difference is compared with 0.
    """

    claim: str = ""
    """Text; by default made from the other keys."""
    metric: str
    """Key of a numeric metric."""
    strategy: Annotated[str, Text]
    """Label of a strategy."""
    against: Annotated[str | dict[str, str], Text] = NONE_GIVEN
    """Another strategy, or labels by axis: the same strategy in another condition."""
    condition: Annotated[dict[str, str], Text] = Field(default_factory=dict)
    """Label on another axis, or labels by axis; optional for axes with one label."""
    direction: Literal["less", "more", "equivalent"]
    """Expected sign of the difference; `equivalent`: within `smallest`."""
    smallest: Annotated[PositiveFloat, WithJsonSchema(SMALLEST)]
    """Smallest difference of interest, in the unit of the metric, or a share such as `25%`."""
    relative: bool = False
    """Whether `smallest` is a share; filled in by dps."""

    @model_validator(mode="before")
    @classmethod
    def _share(cls, data: Any) -> Any:
        written = data.get("smallest") if isinstance(data, dict) else None
        if not isinstance(written, str):
            return data
        try:
            number = float(written.removesuffix("%"))
        except ValueError:
            refuse(
                "expected a number in the unit of the metric (0.01 is 1 point of accuracy), or a "
                f"share such as 25%; got {quoted(written)}",
                "smallest",
            )
        relative = written.endswith("%")
        return {**data, "smallest": number / 100 if relative else number, "relative": relative}

    @model_validator(mode="after")
    def _share_of_something(self) -> ClaimSection:
        if self.relative and self.one_sample:
            refuse("a share needs a strategy to compare with; give against as well", key="smallest")
        return self

    @field_validator("metric")
    @classmethod
    def _is_a_number(cls, key: str) -> str:
        check_known(key, [column.key for column in METRICS if column.number], "figure")
        return key

    @field_validator("condition", mode="before")
    @classmethod
    def _bare_label(cls, condition: Any) -> Any:
        # Of the axis that has it; see `checked`.
        return condition if isinstance(condition, dict) else {"": condition}

    @property
    def column(self) -> Metric:
        """The metric of its figure."""
        return BY_KEY[self.metric]

    @property
    def one_sample(self) -> bool:
        """Whether its figure is a difference already."""
        return self.against == NONE_GIVEN

    @property
    def baseline(self) -> str:
        """The other side of the comparison, in words."""
        if isinstance(self.against, str):
            return self.against
        return ", ".join(f"{axis} {label}" for axis, label in self.against.items())

    @property
    def sides(self) -> tuple[tuple[str, dict[str, str]], ...]:
        """The strategy and condition of the claim, and those that it is compared with.

        One pair if the figure is already a difference, otherwise two.
        """
        own = (self.strategy, self.condition)
        if isinstance(self.against, dict):
            return own, (self.strategy, self.condition | self.against)
        return (own,) if self.one_sample else (own, (self.against, self.condition))

    def resolved(self, baseline: float) -> ClaimSection:
        """Return the claim with `smallest` in the unit of the metric, by the mean of `against`."""
        if not self.relative:
            return self
        return self.model_copy(
            update={"smallest": self.smallest * abs(baseline), "relative": False}
        )

    @property
    def digest(self) -> str:
        """Digest of the claim without its wording."""
        content = self.model_dump(mode="json", exclude={"claim"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[
            :DIGEST_LENGTH
        ]

    def side_of(self, strategy: str, labels: Mapping[str, str]) -> int | None:
        """Return on which of its sides a trial is, by strategy and labels; None: on neither."""
        for side, (name, condition) in enumerate(self.sides):
            if name == strategy and condition.items() <= labels.items():
                return side
        return None


def checked(experiment: ExperimentConfig, narrowed: bool = False) -> tuple[ClaimSection, ...]:
    """Return claims with the axes of their conditions; refuse what is on no axis, with its key.

    If the grid is `narrowed`, claims of what is not in it are left out instead.
    """
    resolved: list[ClaimSection] = []
    for index, claim in enumerate(experiment.claims):
        try:
            whole = _whole(claim, experiment, f"claims.{index}")
        except PydanticCustomError:
            if narrowed:
                continue
            raise
        if whole.digest in [other.digest for other in resolved]:
            refuse("repeats an earlier claim; keep one of them", key=f"claims.{index}")
        resolved.append(whole)
    return tuple(resolved)


def _whole(claim: ClaimSection, experiment: ExperimentConfig, key: str) -> ClaimSection:
    strategies, strategy_axis = experiment.strategies, experiment.strategy_axis
    others = {
        axis: list(labels) for axis, labels in experiment.axes.items() if axis != strategy_axis
    }
    check_known(claim.strategy, strategies, "strategy", f"{key}.strategy")
    whole = claim.model_copy(update={"condition": _condition(claim, others, f"{key}.condition")})
    figure = claim.column
    if claim.one_sample:
        if claim.direction == "less" and not figure.signed and figure.unit in (*FROM_ZERO, "%"):
            refuse(
                f"without `against`, the figure is compared with 0, but {claim.metric} is never "
                "below 0; expected a strategy",
                key=f"{key}.against",
            )
    elif isinstance(claim.against, dict):
        check_labels(claim.against, others, f"{key}.against")
    else:
        check_known(claim.against, strategies, "strategy", f"{key}.against")
    if len(whole.sides) > 1 and whole.sides[0] == whole.sides[1]:
        refuse("compares the strategy with itself; expected another one", key=f"{key}.against")
    for name, condition in whole.sides:
        wanted = condition | ({} if strategy_axis is None else {strategy_axis: name})
        if wanted not in experiment.combinations:
            refuse(f"the grid leaves out {quoted(name)} under this condition", key=key)
    return whole


def _condition(
    claim: ClaimSection, others: Mapping[str, Sequence[str]], key: str
) -> dict[str, str]:
    """Return the label on each of the other axes; an axis with one label may be left out."""
    given = dict(claim.condition)
    if (bare := given.pop("", None)) is not None:
        check_known(bare, [label for labels in others.values() for label in labels], "label", key)
        having = [axis for axis, labels in others.items() if bare in labels]
        if len(having) > 1:
            refuse(
                f"{quoted(bare)} is a label on {first_few(having)}; name the axis as well", key=key
            )
        given = {having[0]: bare}
    given = {axis: labels[0] for axis, labels in others.items() if len(labels) == 1} | given
    if given:
        check_labels(given, others, key)
    for axis, labels in others.items():
        if axis not in given:
            refuse(
                f"a label on the axis {quoted(axis)} is missing; expected one as well, such as "
                f"{{{axis}: {labels[0]}}}",
                key=key,
            )
    return {axis: given[axis] for axis in others}
