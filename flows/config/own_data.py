"""The sections of a configuration that name data of the user's own: files of examples.

Paths are relative to the configuration file. A file is read when the configuration is, so that what
is wrong in it is said before anything runs; what is in it, not where it lies, is part of a trial.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, ValidationInfo, field_validator, model_validator

from dps.errors import ConfigurationError
from flows.config.base import InputPath, Section, is_of_record
from flows.config.errors import refuse, refusing
from flows.quoting import quoted
from flows.readers.svmlight import ZeroBased
from flows.readers.tables import ColumnMissing
from flows.workloads import Dataset, DatasetShape, Part
from flows.workloads.known_file import KnownFile
from flows.workloads.own_code import code_at, find
from flows.workloads.own_data import (
    FileDataset,
    Format,
    FunctionDataset,
    Loaded,
    Preparation,
    Split,
    called,
    loaded,
)

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class SplitSection(Section):
    """Which rows score weights: a share `test` of them drawn from `seed`, or all of another file.

    Of each class the same share is drawn. `sha256` is that of the other file.
    """

    test: Annotated[float, Field(gt=0, lt=1)] = 0.2
    seed: NonNegativeInt = 0
    path: InputPath | None = None
    sha256: Sha256 | None = None

    @model_validator(mode="after")
    def _one_or_the_other(self, info: ValidationInfo) -> SplitSection:
        if self.path is not None and not is_of_record(info):
            drawn = self.model_fields_set & {"test", "seed"}
            if drawn:
                refuse("with a file of its own, no rows are drawn; leave this out", key=min(drawn))
        return self


class OwnDataSection(Section):
    """What data of the user's own have in common."""

    split: SplitSection = SplitSection()
    standardise: bool = False
    task: Literal["classification", "regression"] = "classification"
    standardise_target: bool = False
    # What RMSE is computed with from R²; it follows from the data.
    target_deviation: float | None = None

    @model_validator(mode="after")
    def _targets_can_be_scaled(self) -> OwnDataSection:
        if self.standardise_target and self.task != "regression":
            refuse("classes have no scale; leave it out", key="standardise_target")
        return self

    @property
    def _preparation(self) -> Preparation:
        return Preparation(self.standardise, self.task == "regression", self.standardise_target)

    @property
    @abstractmethod
    def whole(self) -> Loaded:
        """The data set as a whole; raises `ConfigurationError` if it is not as it was planned."""

    @property
    def shape(self) -> DatasetShape:
        """The shape of the data."""
        return self.whole.shape

    def load(self, part: Part = "both") -> Dataset:
        """Load the data set, or a part of it."""
        return self.whole.part(part)

    def decisive(self, written: dict[str, Any]) -> dict[str, Any]:
        """Return what of the section, as it is recorded, results depend on: not where files lie."""
        split = {key: value for key, value in written["split"].items() if key != "path"}
        follows = ("path", "target_deviation")
        kept = {key: value for key, value in written.items() if key not in follows}
        return {**kept, "split": split}


class _FileSection(OwnDataSection):
    """A file of examples; `sha256` is of what is in it, and refuses any other file if it is given.

    With `standardise`, each feature has the mean 0 and the standard deviation 1 in the part that is
    trained on.
    """

    format: ClassVar[Format]
    path: InputPath
    sha256: Sha256 | None = None

    @model_validator(mode="after")
    def _can_be_read(self, info: ValidationInfo) -> _FileSection:
        if is_of_record(info):
            return self
        self._is_known(self, "path")
        self._is_known(self.split, "split.path")
        with refusing("path"):
            try:
                self.__dict__["target_deviation"] = self.whole.target_deviation
            except ColumnMissing as error:
                refuse(str(error), key=error.key)
        return self

    @staticmethod
    def _is_known(section: _FileSection | SplitSection, key: str) -> None:
        if section.path is None:
            return
        with refusing(key):
            found = KnownFile.found(section.path)
        if section.sha256 not in (None, found.sha256):
            told = (
                f"{section.path} has the SHA-256 {found.sha256}, expected the one that is written"
            )
            refuse(told, key=key.replace("path", "sha256"))
        section.__dict__["sha256"] = found.sha256

    @property
    def whole(self) -> Loaded:
        """The data set as a whole; raises `ConfigurationError` if it is not as it was planned."""
        return loaded(self._source())

    def _source(self, **settings: Any) -> FileDataset:
        other = self.split
        return FileDataset(
            self.format,
            KnownFile(self.path, self.sha256 or ""),
            KnownFile(other.path, other.sha256 or "") if other.path is not None else None,
            Split(other.test, other.seed),
            preparation=self._preparation,
            **settings,
        )


class NpzSection(_FileSection):
    """Arrays of numpy: `features` is the name of the one of examples, `target` that of classes."""

    format: ClassVar[Format] = "npz"
    kind: Literal["npz"]
    features: str = "x"
    target: str = "y"

    def _source(self, **settings: Any) -> FileDataset:
        return super()._source(features=(self.features,), target=self.target, **settings)


class _TableSection(_FileSection):
    """Named columns: `target` is the one of classes, `features` are by default all the others."""

    target: str
    features: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None

    @field_validator("features")
    @classmethod
    def _are_not_the_target(
        cls, features: tuple[str, ...] | None, info: ValidationInfo
    ) -> tuple[str, ...] | None:
        for number, name in enumerate(features or ()):
            if name == info.data.get("target"):
                refuse(f"{quoted(name)} is the target, which no feature may tell; leave it out")
            if name in (features or ())[:number]:
                refuse(f"{quoted(name)} is given twice; keep one of them")
        return features

    def _source(self, **settings: Any) -> FileDataset:
        return super()._source(features=self.features, target=self.target, **settings)


class CsvSection(_TableSection):
    """CSV in UTF-8 whose first line names the columns, plain or .gz, or a folder of *.part."""

    format: ClassVar[Format] = "csv"
    kind: Literal["csv"]
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","

    def _source(self, **settings: Any) -> FileDataset:
        return super()._source(delimiter=self.delimiter, **settings)


class ParquetSection(_TableSection):
    """A parquet file, or a folder of them, partitioned or not."""

    format: ClassVar[Format] = "parquet"
    kind: Literal["parquet"]


class PythonDataSection(OwnDataSection):
    """What a function returns, which is given the `settings`: two arrays, or four divided ones.

    It is in a module beside the configuration file, or in one that is installed. `sha256` is of the
    data, which have to be the same in every process.
    """

    kind: Literal["python"]
    function: str
    settings: dict[str, Any] = Field(default_factory=dict)
    path: str | None = None
    sha256: Sha256 | None = None

    @model_validator(mode="after")
    def _has_no_other_file(self, info: ValidationInfo) -> PythonDataSection:
        if self.split.path is not None and not is_of_record(info):
            refuse("a function has no other file; let it return four arrays", key="split.path")
        return self

    def run_code(self, folder: Path) -> None:
        """Call the function, which is looked for in `folder`, and note what its data are."""
        with refusing("dataset.function"):
            self.__dict__["path"] = find(self.function, folder).path
            found = called(self.source)
        if self.sha256 not in (None, found.data.digest):
            told = f"the data have the SHA-256 {found.data.digest}, not this one"
            refuse(told, key="dataset.sha256")
        self.__dict__.update(sha256=found.data.digest, target_deviation=found.target_deviation)

    @property
    def source(self) -> FunctionDataset:
        """The function, as it is now."""
        drawn = Split(self.split.test, self.split.seed)
        settings = json.dumps(self.settings, sort_keys=True)
        return FunctionDataset(
            code_at(self.function, self.path), settings, drawn, self._preparation
        )

    @property
    def whole(self) -> Loaded:
        """The data set as a whole; raises `ConfigurationError` if it is not as it was planned."""
        found = called(self.source)
        if found.data.digest != self.sha256:
            raise ConfigurationError(
                f"{self.function} returned other data than when the trial was planned; it has to "
                "return the same in every process: draw from a generator with a seed"
            )
        return found

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # settings may be nested, and have no hash


class SvmlightSection(_FileSection):
    """An svmlight (libsvm) file, plain or .gz; its rows stay sparse unless `dense` is true.

    Indices begin with 0 if `zero_based`, else with 1; auto: with 0 if one of them is 0.
    """

    format: ClassVar[Format] = "svmlight"
    kind: Literal["svmlight"]
    dense: bool = False
    zero_based: ZeroBased = "auto"

    def _source(self, **settings: Any) -> FileDataset:
        return super()._source(dense=self.dense, zero_based=self.zero_based, **settings)
