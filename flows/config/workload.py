"""The sections of a configuration that say what is trained: the workload and its data set."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Protocol

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator, model_validator

from dps.errors import ConfigurationError
from flows.config.base import Section, refuse
from flows.config.limits import MOST_LAYERS, MOST_WEIGHTS
from flows.workloads import SHAPES, Workload, build_workload
from flows.workloads.with_torch import CROSS_ENTROPY, find, need_torch


class MlpSection(Section):
    """A multilayer perceptron; `hidden` are the widths of its hidden layers."""

    kind: Literal["mlp"]
    hidden: Annotated[tuple[PositiveInt, ...], Field(strict=False, max_length=MOST_LAYERS)] = (32,)

    @field_validator("hidden")
    @classmethod
    def _fits_into_memory(cls, hidden: tuple[int, ...]) -> tuple[int, ...]:
        features = max(shape.features for shape in SHAPES.values())
        weights = sum(inputs * outputs for inputs, outputs in pairwise((features, *hidden)))
        if weights > MOST_WEIGHTS:
            refuse(f"the layers have {weights:,} weights; expected {MOST_WEIGHTS:,} at most")
        return hidden


class SoftmaxSection(Section):
    """Softmax regression; its loss has `l2`/2 times the sum of squared weights added to it."""

    kind: Literal["softmax"]
    l2: NonNegativeFloat = 0.0


class LogisticSection(Section):
    """Logistic regression that tells even classes from odd ones."""

    kind: Literal["logistic"]


class TorchSection(Section):
    """A torch module and its loss, each named as "package.module:name"."""

    kind: Literal["torch"]
    module: str
    loss: str = CROSS_ENTROPY

    @field_validator("module", "loss")
    @classmethod
    def _is_there(cls, reference: str) -> str:
        try:
            find(reference)
        except ConfigurationError as error:
            refuse(str(error))
        return reference


class CnnSection(Section):
    """The convolutional network of "Training Through Failure"; there with a ReLU on its logits."""

    kind: Literal["cnn"]
    relu_logits: bool = False

    @model_validator(mode="after")
    def _torch_is_there(self) -> CnnSection:
        try:
            need_torch()
        except ConfigurationError as error:
            refuse(str(error))
        return self


WorkloadSection = Annotated[
    MlpSection | SoftmaxSection | LogisticSection | TorchSection | CnnSection,
    Field(discriminator="kind"),
]


class DigitsSection(Section):
    """The 8 × 8 digits that scikit-learn carries.

    Weights are scored on the first `test_examples` of the test part, or on all of it.
    """

    kind: Literal["digits"]
    test_examples: Annotated[int, Field(ge=1, le=360)] | None = None


class FashionMnistSection(Section):
    """Fashion-MNIST; `folder` names its files where they are not in the usual place.

    Pixels are in [-1, 1] (`symmetric`) or in [0, 1] (`unit`).
    Weights are scored on the first `test_examples` of the test part, or on all of it.
    """

    kind: Literal["fashion_mnist"]
    folder: str | None = None
    pixels: Literal["symmetric", "unit"] = "symmetric"
    test_examples: Annotated[int, Field(ge=1, le=10_000)] | None = None


DatasetSection = Annotated[DigitsSection | FashionMnistSection, Field(discriminator="kind")]


class Trained(Protocol):
    """A configuration that says what is trained."""

    @property
    def workload(self) -> WorkloadSection:
        """The model."""
        ...

    @property
    def dataset(self) -> DatasetSection:
        """What it is trained on."""
        ...


def workload_of(config: Trained) -> Workload:
    """Return the workload of a configuration, for the shape of its data."""
    chosen = config.workload.model_dump()
    return build_workload(chosen.pop("kind"), SHAPES[config.dataset.kind], **chosen)
