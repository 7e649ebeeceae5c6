"""The sections of a configuration for the workload and its data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from flows.config.errors import refuse, refusing
from flows.config.own_data import (
    NpzSection,
    OwnDataSection,
    PythonDataSection,
    Sha256,
    SvmlightSection,
    TableSection,
)
from flows.config.sections import Derived, Group, Section
from flows.config.settings import TrainingSection
from flows.workloads import DATASETS as BUILT_IN
from flows.workloads import (
    MLP,
    Dataset,
    DatasetShape,
    DatasetSource,
    ParityRegression,
    Part,
    SoftmaxRegression,
    Workload,
)
from flows.workloads.own_code import OwnCode
from flows.workloads.own_code import find as find_code
from flows.workloads.python_model import PythonModel
from flows.workloads.with_torch import CROSS_ENTROPY, find, torch_module

if TYPE_CHECKING:
    from flows.config.experiment import TrialConfig

FEWER = "expected a batch of at most this number"
TAKES_SPARSE = ("softmax", "mlp", "logistic")  # their layers are no more than products
PREDICTS_NUMBERS = ("mlp", "torch", "python")
OF_NUMBERS = ("r2", "rmse")  # scores of predictions that are numbers
SCORED_BY_AUC = ("softmax", "mlp", "logistic", "torch", "python")


class ModelSection(Derived):
    """A workload of dps, or one that an installed package registers."""

    given: ClassVar[tuple[str, ...]] = ("shape",)
    kind: str

    def build(self, shape: DatasetShape | None = None) -> Workload:
        """Return the workload for data of a shape; raises `ConfigurationError`."""
        workload: Workload = self.made(shape=shape)
        return workload

    def check_settings(self) -> None:
        """Do nothing: settings are checked when the shape of the data is known."""


class OwnModelSection(ModelSection):
    """A workload of dps."""

    given = ("shape", "dtype")

    def check_settings(self) -> None:
        """Refuse what no shape of the data would allow."""
        self.made(shape=DatasetShape(features=1, classes=2))


class TorchSection(Section):
    """A torch module, made by your function for the shape of the data."""

    kind: Literal["torch"]
    module: str
    """Function that returns the module, `"package.module:name"`."""
    loss: str = CROSS_ENTROPY
    """Function of scores and classes that returns the mean over the batch."""

    @field_validator("module", "loss")
    @classmethod
    def _is_there(cls, reference: str) -> str:
        with refusing():
            find(reference)
        return reference

    def build(self, shape: DatasetShape) -> Workload:
        """Return the workload for data of a shape."""
        return torch_module(shape, self.module, self.loss)


class PythonSection(Section):
    """Your own class, which receives the shape of the data."""

    kind: Literal["python"]
    module: str
    """Class, `"module:name"`, beside the configuration or installed."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class."""
    path: str | None = None
    """File of the module; filled in by dps."""
    sha256: Sha256 | None = None
    """Digest of the module's file; another file is rejected."""

    def with_code(self, folder: Path) -> PythonSection:
        """Import the module, which is looked for in `folder`, and return the section with it."""
        with refusing("workload.module"):
            code = find_code(self.module, folder)
            code.load()
        if self.sha256 not in (None, code.sha256):
            reason = f"the module has another SHA-256: {code.sha256}"
            refuse(reason, key="workload.sha256")
        return self.model_copy(update={"path": code.path, "sha256": code.sha256})

    def build(self, shape: DatasetShape) -> PythonModel:
        """Return the workload for data of a shape; raises `ConfigurationError`."""
        code = OwnCode(self.module, self.path, self.sha256 or "")
        return PythonModel(shape, code, json.dumps(self.settings, sort_keys=True))


_MODELS = (MLP, SoftmaxRegression, ParityRegression)
WORKLOADS = Group(
    _MODELS, ModelSection, dict.fromkeys(_MODELS, OwnModelSection), name="dps.workloads"
)
WorkloadSection = Annotated[ModelSection | TorchSection | PythonSection, WORKLOADS]


class SourceSection(Derived):
    """A data set that an installed package registers."""

    kind: str

    @property
    def shape(self) -> DatasetShape:
        """The shape of the data."""
        return self._source.shape

    def load(self, part: Part = "both") -> Dataset:
        """Load the data set, or a part of it."""
        return self._source.load(part)

    @property
    def train_rows(self) -> int | None:
        """The number of training examples; None if not known yet."""
        return getattr(self._source, "train_rows", None)

    @property
    def _source(self) -> DatasetSource:
        source: DatasetSource = self.build()
        return source


DATASETS = Group(tuple(BUILT_IN.values()), SourceSection, name="dps.datasets")

DatasetSection = Annotated[
    SourceSection | NpzSection | TableSection | SvmlightSection | PythonDataSection,
    DATASETS,
]


def workload_of(config: TrialConfig) -> Workload:
    """Return the workload of a configuration, for the shape of its data."""
    return config.workload.build(config.dataset.shape)


def batch_objection(training: TrainingSection, name: str, rows: int) -> str | None:
    """Return why batches are too large for this number of rows of a data set; None: they fit."""
    by_class = training.partition == "by_class"
    each = rows // training.workers if by_class else rows
    batches = training.updates // training.epochs * training.local_steps if training.epochs else 1
    if training.batch_size * batches <= each:
        return None
    if batches > 1:
        return f"{name} has {each:,} rows to train on, too few for {batches:,} batches in an epoch"
    return f"{name} has {each:,} rows to train on{' for each worker' * by_class}; {FEWER}"


def misfit(config: TrialConfig) -> tuple[str, str] | None:
    """Return the key to change and the reason if a model cannot be trained on the data, or None.

    Raises `ConfigurationError` if the data differ from the planned ones, or the model rejects their
    shape.
    """
    dataset, section, training = config.dataset, config.workload, config.training
    if not isinstance(dataset, OwnDataSection):
        with refusing("dataset"):
            rows = dataset.train_rows
        unfit = None if rows is None else batch_objection(training, dataset.kind, rows)
        return None if unfit is None else ("training.batch_size", unfit)
    data, shape = dataset.whole, dataset.shape
    if unfit := batch_objection(training, data.name, len(data.y_train)):
        return "training.batch_size", unfit
    if shape.regression and section.kind not in PREDICTS_NUMBERS:
        problem = f"{section.kind} cannot predict numbers; use {', '.join(PREDICTS_NUMBERS)}"
        return "workload.kind", problem
    if section.kind == "logistic" and shape.classes != 2:
        problem = f"logistic needs two classes, but {data.name} has {shape.classes}; use softmax"
        return "workload.kind", problem
    if shape.sparse and section.kind not in (*TAKES_SPARSE, "python"):
        problem = f"{section.kind} does not accept sparse rows; set dense: true, or use "
        return "dataset.kind", problem + ", ".join(TAKES_SPARSE)
    return None


def score_objection(config: TrialConfig, metric: str | None) -> str | None:
    """Return why a model cannot be scored by a metric on its data; None if it can."""
    dataset, kind = config.dataset, config.workload.kind
    if metric in (None, "loss"):
        return None
    if dataset.shape.regression:
        known = "use r2, rmse or loss for regression"
        return None if metric in OF_NUMBERS else f"{metric} is for classes; {known}"
    if metric in OF_NUMBERS:
        return f"{metric} is for numbers; it needs data with task: regression"
    if metric == "accuracy":
        return None
    if dataset.shape.classes != 2:
        return f"auc needs two classes, but the data have {dataset.shape.classes}; use accuracy"
    if kind not in SCORED_BY_AUC:
        return f"auc needs scores of classes, not {kind}; use {', '.join(SCORED_BY_AUC)}"
    if isinstance(dataset, OwnDataSection) and not 0 < dataset.load("test").y_test.mean() < 1:
        return "auc needs two classes, but all rows to score have one class"
    return None
