"""The sections of a configuration that name a user's data: a file of examples, or a function.

Paths are relative to the configuration file. A file is read when the configuration is, so that
mistakes in it are reported before anything runs; its content, not its place, is part of a trial.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, ValidationInfo, field_validator, model_validator

from dps.errors import ConfigurationError
from flows.config.errors import refuse, refusing
from flows.config.sections import InputPath, Section, is_of_record
from flows.quoting import quoted
from flows.readers import (
    ColumnUnfit,
    Examples,
    read_csv,
    read_npz,
    read_parquet,
    read_svmlight,
    table_examples,
)
from flows.workloads import Dataset, DatasetShape, Part
from flows.workloads.base import Array
from flows.workloads.own_code import OwnCode, check_file, code_at, find, sha256_of
from flows.workloads.own_code import refusing as refusing_code
from flows.workloads.own_data import prepared, returned

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class SplitSection(Section):
    """The draw of the scored rows."""

    test: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of each class that is scored."""
    seed: NonNegativeInt = 0
    """Seed of the draw."""


class OwnDataSection(Section):
    """The keys that files and functions have in common."""

    split: SplitSection = SplitSection()
    """Examples to score, if the data have no test part."""
    standardise: bool = False
    """Scale features to mean 0 and standard deviation 1 in the training part."""
    task: Literal["classification", "regression"] = "classification"
    """Whether the target is a class or a number."""
    standardise_target: bool = False
    """Scale the target likewise; regression only."""
    target_deviation: float | None = None
    """Standard deviation of the target in the test part; filled in by dps."""

    @model_validator(mode="after")
    def _targets_can_be_scaled(self) -> OwnDataSection:
        if self.standardise_target and self.task != "regression":
            refuse("classes cannot be standardised; leave it out", key="standardise_target")
        return self

    @property
    def _regression(self) -> bool:
        return self.task == "regression"

    def _prepared(self, name: str, examples: Examples, scored: Array | None = None) -> Dataset:
        return prepared(
            name,
            examples,
            scored,
            test=self.split.test,
            seed=self.split.seed,
            standardise=self.standardise,
            regression=self._regression,
            standardise_target=self.standardise_target,
        )

    @property
    def whole(self) -> Dataset:
        """The data set as a whole; raises `ConfigurationError` if it is not as it was planned."""
        return _loaded(self)

    @abstractmethod
    def read(self) -> Dataset:
        """Read the data set; see `whole`, which keeps it."""

    @property
    def shape(self) -> DatasetShape:
        """The shape of the data."""
        return self.whole.shape

    def load(self, part: Part = "both") -> Dataset:
        """Load the data set, or a part of it."""
        data = self.whole
        if part == "test":
            return replace(data, x_train=data.x_train[:0], y_train=data.y_train[:0])
        if part == "train":
            return replace(data, x_test=data.x_test[:0], y_test=data.y_test[:0])
        return data

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # the settings of a function have no hash


# The last ones: shape and parts are asked for one after the other.
@lru_cache(maxsize=2)
def _loaded(section: OwnDataSection) -> Dataset:
    return section.read()


def _deviation(data: Dataset) -> float | None:
    """Return the standard deviation of a numeric target in the scored part, before scaling."""
    return float(data.y_test.std(dtype=np.float64) * data.target_scale) if data.regression else None


class FileSection(OwnDataSection):
    """A file of examples."""

    path: InputPath
    """Path, relative to the configuration."""
    sha256: Sha256 | None = None
    """Digest of the file; another file is rejected."""

    @model_validator(mode="after")
    def _can_be_read(self, info: ValidationInfo) -> FileSection:
        if is_of_record(info):
            return self
        with refusing("path"):
            digest = sha256_of(self.path)
        if self.sha256 not in (None, digest):
            refuse(f"{self.path} has another SHA-256: {digest}", key="sha256")
        self.__dict__["sha256"] = digest
        with refusing("path"):
            try:
                self.__dict__["target_deviation"] = _deviation(self.whole)
            except ColumnUnfit as error:
                refuse(str(error), key=error.key)
        return self

    def read(self) -> Dataset:
        """Read the file."""
        check_file(self.path, self.sha256 or "")
        path = Path(self.path)
        return self._prepared(path.name, self._examples(path))

    @abstractmethod
    def _examples(self, path: Path) -> Examples:
        """Read the examples of the file."""


class NpzSection(FileSection):
    """A `.npz` file with an array of examples and one of targets."""

    kind: Literal["npz"]
    features: str = "x"
    """Name of the array of examples."""
    target: str = "y"
    """Name of the array of targets."""

    def _examples(self, path: Path) -> Examples:
        return read_npz(path, self.features, self.target, self._regression)


class SvmlightSection(FileSection):
    """An svmlight (libsvm) file of sparse rows, plain or `.gz`."""

    kind: Literal["svmlight"]
    dense: bool = False
    """Convert the rows to a dense array."""

    def _examples(self, path: Path) -> Examples:
        data = read_svmlight(path)
        return replace(data, x=data.x.toarray()) if self.dense else data


class TableSection(FileSection):
    """A table: CSV in UTF-8 with a header, plain or `.gz`; or parquet, a file or a folder."""

    kind: Literal["csv", "parquet"]
    target: str
    """Target column."""
    features: Names | None = None
    """Feature columns; `null`: all others."""
    missing: Literal["refuse", "drop", "mean"] = "refuse"
    """Rows with empty cells: reject the file, drop the rows, or insert the training mean."""
    one_hot: Names | None = None
    """Columns of which each value becomes a feature that is 0 or 1."""
    dates: Names | None = None
    """Columns that become days since 1970."""

    @field_validator("features")
    @classmethod
    def _target_is_none(cls, features: Any, info: ValidationInfo) -> Any:
        target = info.data.get("target")
        if features is not None and target in features:
            refuse(f"{quoted(target)} is the target and cannot be a feature; leave it out")
        if features is not None and len(set(features)) < len(features):
            refuse("a column is given twice; keep one of them")
        return features

    def _examples(self, path: Path) -> Examples:
        return table_examples(
            read_csv(path) if self.kind == "csv" else read_parquet(path),
            self.target,
            self.features,
            self.missing,
            self.one_hot or (),
            self.dates or (),
            self._regression,
        )


class PythonDataSection(OwnDataSection):
    """The arrays that a function returns: x and y, or both for training and test."""

    kind: Literal["python"]
    function: str
    """Function, `"module:name"`, beside the configuration or installed."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function."""
    path: str | None = None
    """File of the module; filled in by dps."""
    sha256: Sha256 | None = None
    """Digest of the data; other data are rejected."""

    def run_code(self, folder: Path) -> None:
        """Call the function, which is looked for in `folder`, and keep the digest of its data."""
        with refusing("dataset.function"):
            self.__dict__["path"] = find(self.function, folder).path
            data = self._call()
        if self.sha256 not in (None, data.digest):
            refuse(f"the data have another SHA-256: {data.digest}", key="dataset.sha256")
        self.__dict__.update(sha256=data.digest, target_deviation=_deviation(data))

    def read(self) -> Dataset:
        """Call the function, and check that its data are those that were planned."""
        return self._checked(self._call())

    def check_again(self) -> None:
        """Call the function once more; raise `ConfigurationError` if it returns other data."""
        self._checked(_called.__wrapped__(self, code_at(self.function, self.path)))

    def _checked(self, data: Dataset) -> Dataset:
        if data.digest != self.sha256:
            raise ConfigurationError(
                f"{self.function} returned other data on a second call, expected the same data in "
                "every process: use a random generator with a fixed seed"
            )
        return data

    def _call(self) -> Dataset:
        unknown = {"sha256": None, "target_deviation": None}  # same key before and after
        return _called(self.model_copy(update=unknown), code_at(self.function, self.path))


@lru_cache(maxsize=2)
def _called(section: PythonDataSection, code: OwnCode) -> Dataset:
    function = code.load()
    with refusing_code(section.function, "failed"):
        arrays = function(**json.loads(json.dumps(section.settings)))
    examples, scored = returned(section.function, arrays, section.task == "regression")
    return section._prepared(section.function, examples, scored)
