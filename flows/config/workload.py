"""The sections of a configuration that say what is trained: the workload and its data set."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from flows.config.base import KIND_ALONE, InputPath, Section, TrainingSection, is_of_record
from flows.config.errors import refuse, refusing
from flows.config.limits import MOST_LAYERS, MOST_WEIGHTS
from flows.config.own_data import (
    CsvSection,
    NpzSection,
    OwnDataSection,
    ParquetSection,
    PythonDataSection,
    Sha256,
    SvmlightSection,
)
from flows.config.plugins import Group, Registered
from flows.workloads import (
    SHAPES,
    Dataset,
    DatasetShape,
    DatasetSource,
    Part,
    PatchDataset,
    Workload,
    build_workload,
    find_dataset,
    load_dataset,
)
from flows.workloads.base import side_of_images
from flows.workloads.datasets import DIGITS_TRAIN_EXAMPLES
from flows.workloads.fashion_mnist import train_rows
from flows.workloads.own_code import OwnCode
from flows.workloads.own_code import find as find_code
from flows.workloads.python_model import Model, PythonModel
from flows.workloads.with_torch import CROSS_ENTROPY, find, need_torch

FEWER = "expected a batch of at most that many"
MOST_FILTERS = 4096
MOST_PATCHES = 1_000_000
TAKES_SPARSE = ("softmax", "mlp", "logistic", "linear")  # their layers are no more than products
PREDICTS_NUMBERS = ("linear", "mlp", "torch", "python")
OF_NUMBERS = ("r2", "rmse")  # scores of predictions that are numbers
SCORED_BY_AUC = ("softmax", "mlp", "logistic", "torch", "cnn", "python")


class _WorkloadSection(Section):
    """What all workloads of dps have in common: their section is what they are built of."""

    def build(self, shape: DatasetShape) -> Workload:
        """Return the workload for data of a shape."""
        chosen = self.model_dump()
        return build_workload(chosen.pop("kind"), shape, **chosen)


class MlpSection(_WorkloadSection):
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


class SoftmaxSection(_WorkloadSection):
    """Softmax regression; its loss has `l2`/2 times the sum of squared weights added to it."""

    kind: Literal["softmax"]
    l2: NonNegativeFloat = 0.0


class LogisticSection(_WorkloadSection):
    """Logistic regression that tells even classes from odd ones."""

    kind: Literal["logistic"]


class LinearSection(_WorkloadSection):
    """Least squares; its loss has `l2`/2 times the sum of squared weights added to it."""

    kind: Literal["linear"]
    l2: NonNegativeFloat = 0.0


class RicaSection(_WorkloadSection):
    """Reconstruction ICA: so many `filters`, and the weight of their rare response."""

    kind: Literal["rica"]
    filters: Annotated[PositiveInt, Field(le=MOST_FILTERS)] = 64
    sparsity: NonNegativeFloat = 0.5


class TorchSection(_WorkloadSection):
    """A torch module and its loss, each named as "package.module:name"."""

    kind: Literal["torch"]
    module: str
    loss: str = CROSS_ENTROPY

    @field_validator("module", "loss")
    @classmethod
    def _is_there(cls, reference: str) -> str:
        with refusing():
            find(reference)
        return reference


class CnnSection(_WorkloadSection):
    """The convolutional network of "Training Through Failure"; there with a ReLU on its logits."""

    kind: Literal["cnn"]
    relu_logits: bool = False

    @model_validator(mode="after")
    def _torch_is_there(self) -> CnnSection:
        with refusing():
            need_torch()
        return self


class PythonSection(Section):
    """A class of the user's own, "module:name", which is given the shape and the `settings`.

    Its module is a file beside the configuration file, or an installed one; `sha256` is that of the
    module's file.
    """

    kind: Literal["python"]
    module: str
    settings: dict[str, Any] = Field(default_factory=dict)
    path: str | None = None
    sha256: Sha256 | None = None

    def run_code(self, folder: Path) -> None:
        """Import the module, which is looked for in `folder`, and note what it is."""
        with refusing("workload.module"):
            found = find_code(self.module, folder)
            found.load()
        if self.sha256 not in (None, found.sha256):
            told = f"the module has the SHA-256 {found.sha256}, not this one"
            refuse(told, key="workload.sha256")
        # Not as if it had been written: what is read later may be another file.
        self.__dict__.update(path=found.path, sha256=found.sha256)

    def build(self, shape: DatasetShape) -> Workload:
        """Return the workload for data of a shape."""
        return self._made(shape)

    def model(self, shape: DatasetShape) -> Model:
        """Make the user's model for data of a shape; raises `ConfigurationError`."""
        return self._made(shape).model

    def _made(self, shape: DatasetShape) -> PythonModel:
        code = OwnCode(self.module, self.path, self.sha256 or "")
        return PythonModel(shape, code, json.dumps(self.settings, sort_keys=True))


class _RegisteredWorkload(Registered, Section):
    """A workload that an installed package registers."""

    def build(self, shape: DatasetShape) -> Workload:
        """Return the workload for data of a shape; raises `ConfigurationError`."""
        workload: Workload = self.made(shape=shape)
        return workload

    def check_settings(self) -> None:
        """Nothing can be told before the shape of the data is known."""


WORKLOADS = Group(
    "dps.workloads",
    _RegisteredWorkload,
    needed=("name", "parameters", "initial", "gradient", "evaluate"),
    given=("shape",),
)

WorkloadSection = Annotated[
    MlpSection
    | SoftmaxSection
    | LogisticSection
    | LinearSection
    | RicaSection
    | TorchSection
    | CnnSection
    | PythonSection,
    Field(discriminator="kind"),
    WORKLOADS,
    KIND_ALONE,
]


class _DatasetSection(Section):
    """What all data sets of dps have in common: their section is what they are loaded by."""

    kind: str

    @property
    def shape(self) -> DatasetShape:
        """The shape of the data."""
        return SHAPES[self.kind]

    def load(self, part: Part = "both") -> Dataset:
        """Load the data set, or a part of it."""
        return load_dataset(**self.model_dump(), part=part)


class DigitsSection(_DatasetSection):
    """The 8 × 8 digits that scikit-learn carries.

    Weights are scored on the first `test_examples` of the test part, or on all of it.
    """

    kind: Literal["digits"]
    train_rows: ClassVar[int] = DIGITS_TRAIN_EXAMPLES
    test_examples: Annotated[int, Field(ge=1, le=360)] | None = None


class FashionMnistSection(_DatasetSection):
    """Fashion-MNIST; `folder` names its files where they are not in the usual place.

    Pixels are in [-1, 1] (`symmetric`) or in [0, 1] (`unit`).
    Weights are scored on the first `test_examples` of the test part, or on all of it.
    """

    kind: Literal["fashion_mnist"]
    folder: InputPath | None = None
    pixels: Literal["symmetric", "unit"] = "symmetric"
    test_examples: Annotated[int, Field(ge=1, le=10_000)] | None = None

    @property
    def train_rows(self) -> int | None:
        """How many examples there are to train on; None: the files are not here yet."""
        return train_rows(self.folder)

    @field_validator("folder")
    @classmethod
    def _has_the_files(cls, folder: str | None, info: ValidationInfo) -> str | None:
        if folder is not None and not is_of_record(info):
            with refusing():
                find_dataset("fashion_mnist", folder)
        return folder


class PatchesSection(Section):
    """Whitened patches of `size` × `size` pixels of `images`, which `rica` learns filters of.

    `count` are to train on, a tenth as many to score weights on; `seed` says where they are cut.
    """

    kind: Literal["patches"]
    count: Annotated[PositiveInt, Field(le=MOST_PATCHES)] = 10_000
    size: Annotated[int, Field(ge=2)] = 6
    components: PositiveInt = 24
    images: Literal["digits", "fashion_mnist"] = "digits"
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _can_be_cut(self) -> PatchesSection:
        with refusing():
            self._made()
        return self

    @property
    def shape(self) -> DatasetShape:
        """The shape of the data."""
        return self._made().shape

    @property
    def train_rows(self) -> int:
        """How many examples there are to train on."""
        return self.count

    def load(self, part: Part = "both") -> Dataset:
        """Load the data set, or a part of it."""
        return self._made().load(part)

    def _made(self) -> PatchDataset:
        return PatchDataset(**self.model_dump(exclude={"kind"}))


class _RegisteredDataset(Registered, Section):
    """A data set that an installed package registers."""

    train_rows: ClassVar[None] = None  # known when it is loaded

    @property
    def shape(self) -> DatasetShape:
        """The shape of the data."""
        return self._source.shape

    def load(self, part: Part = "both") -> Dataset:
        """Load the data set, or a part of it."""
        return self._source.load(part)

    @property
    def _source(self) -> DatasetSource:
        source: DatasetSource = self.made()
        return source


DATASETS = Group("dps.datasets", _RegisteredDataset, needed=("shape", "load"))

DatasetSection = Annotated[
    DigitsSection
    | FashionMnistSection
    | PatchesSection
    | NpzSection
    | CsvSection
    | ParquetSection
    | SvmlightSection
    | PythonDataSection,
    Field(discriminator="kind"),
    DATASETS,
    KIND_ALONE,
]


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
    return config.workload.build(config.dataset.shape)


def decisive(config: Trained, written: dict[str, Any]) -> dict[str, Any]:
    """Return what of both sections, as they are recorded, a trial's results depend on."""
    workload, dataset = written["workload"], written["dataset"]
    if isinstance(config.workload, PythonSection):
        workload = {key: value for key, value in workload.items() if key != "path"}
    if isinstance(config.dataset, OwnDataSection):
        dataset = config.dataset.decisive(dataset)
    return {"workload": workload, "dataset": dataset}


def batch_objection(training: TrainingSection, name: str, rows: int) -> str | None:
    """Return why batches are too large for this number of rows of a data set; None: they fit."""
    by_class = training.partition == "by_class"
    each = rows // training.workers if by_class else rows
    if training.batch_size <= each:
        return None
    return f"{name} has {each:,} rows to train on{' for each worker' * by_class}; {FEWER}"


def misfit(config: Trained, training: TrainingSection) -> tuple[str, str] | None:
    """Say why a model cannot be trained on the data, with the key to change.

    Raises
    ------
    ConfigurationError
        The data are not as they were planned, or the model refuses their shape.
    """
    dataset, section = config.dataset, config.workload
    if section.kind == "linear" and not dataset.shape.regression:
        return "workload.kind", "linear predicts numbers; it needs data with task: regression"
    if section.kind == "cnn":
        side_of_images(dataset.shape)
    if not isinstance(dataset, OwnDataSection):
        rows = dataset.train_rows
        unfit = None if rows is None else batch_objection(training, dataset.kind, rows)
        return None if unfit is None else ("training.batch_size", unfit)
    data, shape = dataset.whole.data, dataset.shape
    if unfit := batch_objection(training, data.name, len(data.y_train)):
        return "training.batch_size", unfit
    if shape.regression and section.kind not in PREDICTS_NUMBERS:
        told = f"{section.kind} predicts no numbers; use {', '.join(PREDICTS_NUMBERS)}"
        return "workload.kind", told
    if section.kind == "logistic" and shape.classes != 2:
        told = f"logistic tells two classes apart, and {data.name} has {shape.classes}; use softmax"
        return "workload.kind", told
    if shape.sparse and section.kind not in (*TAKES_SPARSE, "python"):
        told = f"{section.kind} takes no sparse rows; give dense: true, or use "
        return "dataset.kind", told + ", ".join(TAKES_SPARSE)
    hidden = section.hidden if isinstance(section, MlpSection) else ()
    widths = (shape.features, *hidden, shape.classes)
    weights = sum(inputs * outputs for inputs, outputs in pairwise(widths))
    if section.kind in TAKES_SPARSE and weights > MOST_WEIGHTS:
        told = f"{data.name} has {shape.features:,} features: the layers have {weights:,} weights"
        return "dataset.path", f"{told}; expected {MOST_WEIGHTS:,} at most"
    return None


def score_objection(config: Trained, metric: str | None) -> str | None:
    """Say why a model cannot be scored by a metric on its data, if it cannot."""
    dataset, kind = config.dataset, config.workload.kind
    if metric in (None, "loss"):
        return None
    if dataset.shape.regression:
        known = "regression is scored by r2, rmse or loss"
        return None if metric in OF_NUMBERS else f"{metric} is for classes; {known}"
    if metric in OF_NUMBERS:
        return f"{metric} is for numbers; it needs data with task: regression"
    if metric == "accuracy":
        return None
    if dataset.shape.classes != 2:
        return f"auc is for two classes, and the data have {dataset.shape.classes}; use accuracy"
    if kind not in SCORED_BY_AUC:
        return f"{kind} gives no scores of classes; auc needs {', '.join(SCORED_BY_AUC)}"
    if isinstance(dataset, OwnDataSection) and not 0 < dataset.load("test").y_test.mean() < 1:
        return "the rows that are to be scored are all of one class; auc needs both"
    return None
