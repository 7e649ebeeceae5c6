"""The section `dataset` of a configuration for a user's file, as `dps new` writes it.

The file is read as in a run, so errors in it are reported before the configuration is written. Each
guess is in the configuration, where the user can change it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
import yaml
from pydantic import ValidationError

from dps.errors import ConfigurationError
from flows.config.errors import complaints
from flows.config.own_data import FileSection, NpzSection, SvmlightSection, TableSection
from flows.quoting import listed, quoted, shown
from flows.readers import (
    Array,
    Table,
    as_numbers,
    labels,
    looks_like_numbers,
    read_csv,
    read_npz,
    read_parquet,
    read_svmlight,
    row_labels,
)
from flows.workloads import Dataset
from flows.workloads.own_code import sha256_of
from flows.workloads.own_data import MIN_TO_DIVIDE, summary

MAX_CLASSES = 20  # more different whole numbers are a regression, unless --task is given
MAX_VALUES = 20  # at most, in a column of texts that is one-hot encoded
MAX_LISTED = 20  # columns in a message
KINDS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".npz": "npz",
    ".svm": "svmlight",
    ".svmlight": "svmlight",
    ".libsvm": "svmlight",
}
OTHER_TASK = {"classification": "regression", "regression": "classification"}
COMMENTS = {
    "path": "relative to this file",
    "missing": "fill empty cells with the mean of their column; drop: omit their rows",
    "one_hot": "one 0/1 feature for each value",
    "dates": "converted to days since 1970",
    "split": "a fifth of the rows is held out for evaluation",
    "standardise": "features to mean 0 and standard deviation 1",
    "standardise_target": "the target too; scores keep its unit",
}


@dataclass(frozen=True)
class DataFile:
    """A user's file as a data set, with its section `dataset`.

    `target_deviation` is the standard deviation of a numeric target. `guessed` warns that the task
    was guessed from targets that are numbers. `left_out` has unusable columns, each with the
    reason.
    """

    section: Mapping[str, Any]
    data: Dataset
    target_deviation: float | None
    guessed: bool
    left_out: Mapping[str, str]

    @property
    def score(self) -> str:
        """The score of models of it."""
        if self.data.regression:
            return "rmse"
        return "auc" if self.data.classes == 2 else "accuracy"

    @property
    def learning_rate(self) -> float:
        """A rate at which least squares do not diverge, for features of any scale."""
        if not self.data.regression:
            return 0.1
        x = self.data.x_train
        values = x if isinstance(x, np.ndarray) else x.data
        square = float(np.vdot(values, values)) / x.shape[0]
        return float(f"{min(0.1, 0.5 / max(square, 1e-9)):.1g}")

    def text(self) -> str:
        """Return the section as YAML, with a comment on each fact and guess."""
        lines = [f"# {line}" for line in wrap(shown(summary(self.data), 400), 94)]
        if self.left_out:
            lines.append("# Columns that are not used:")
            lines += [f"#   {shown(quoted(n))} {reason}" for n, reason in self.left_out.items()]
        for key, value in self.section.items():
            comment = COMMENTS.get(key, "")
            if key == "task" and self.guessed:
                comment = f"guessed; otherwise, run `dps new` with --task {OTHER_TASK[value]}"
            style = None if isinstance(value, list | dict) else False
            entry = yaml.safe_dump(
                {key: value},
                default_flow_style=style,
                sort_keys=False,
                width=float("inf"),
                allow_unicode=True,
            )
            lines.append(entry.rstrip("\n") + (f"  # {comment}" if comment else ""))
        return "\n".join(["dataset:", *(f"  {line}" for line in lines)])


def data_file(path: Path, target: str | None, task: str | None, folder: Path) -> DataFile:
    """Return how a file can be learnt from; `folder` is that of the configuration.

    Without a `target`, svmlight files have theirs; without a `task`, it is guessed from the
    targets. Raises `ConfigurationError` if there is no such target, it does not suit the task, or
    something in the file is wrong.
    """
    path = path.expanduser()
    name = path.name.lower().removesuffix(".gz")
    kind = KINDS.get("." + name.rpartition(".")[2])
    if path.is_dir() and any(path.rglob("*.parquet")):
        kind = "parquet"
    if kind is None:
        raise ConfigurationError(
            f"{path}: expected a file whose name ends in {', '.join(KINDS)}, or a folder of "
            ".parquet files. For other formats, write a Python function that returns the data "
            "(dataset.kind: python)"
        )
    sha256_of(str(path))
    section: dict[str, Any] = {"kind": kind, "path": str(path)}
    if not path.is_absolute() and folder != Path():
        section["path"] = os.path.relpath(path.resolve(), folder.resolve())
    cls: type[FileSection] = TableSection
    left_out: dict[str, str] = {}
    if kind == "svmlight":
        if target is not None:
            raise ConfigurationError(
                f"--target {target}: not possible for svmlight, whose lines begin with the target "
                f"({path}); omit it"
            )
        cls, y = SvmlightSection, read_svmlight(path).y
    elif kind == "npz":
        section["target"] = target or "y"
        cls, y = NpzSection, read_npz(path, y=section["target"]).y
    else:
        table = read_csv(path) if kind == "csv" else read_parquet(path)
        names = [*table.frame.columns]
        if target is None:
            raise ConfigurationError(
                f"--target: expected a column of {path}: {listed(map(quoted, names), MAX_LISTED)}"
            )
        section["target"] = target
        left_out = _choose_columns(table, target, section)
        known = target in names  # if not, the section raises an error that lists the columns
        y = labels(table.frame[target], table.place(target)) if known else np.empty(0)
    numbers = y.dtype.kind == "f"
    if task == "regression" and not numbers:
        raise ConfigurationError(f"{path}: the target is not numeric; omit --task regression")
    section["task"] = task or _guessed(y)
    section["split"] = {"test": 0.2, "seed": 0}
    if kind != "svmlight":
        section["standardise"] = True
    if section["task"] == "regression":
        section["standardise_target"] = True
    try:
        made = cls.model_validate({**section, "path": str(path.absolute())})
    except ValidationError as error:
        raise ConfigurationError(complaints(error)[0][1]) from error
    return DataFile(section, made.whole, made.target_deviation, task is None and numbers, left_out)


def _choose_columns(table: Table, target: str, section: dict[str, Any]) -> dict[str, str]:
    """Add the keys that select features; return the columns left out, each with the reason."""
    roles = {name: _role(table.frame, name) for name in table.frame.columns if name != target}
    left_out = {n: role for n, role in roles.items() if role not in ("number", "one_hot", "dates")}
    kept = [name for name in roles if name not in left_out]
    if roles and not kept:
        name, reason = next(iter(left_out.items()))
        raise ConfigurationError(
            f"{table.path}: no usable feature column is left: {quoted(name)} {reason}"
        )
    if left_out:
        section["features"] = kept
    for key in ("one_hot", "dates"):
        if chosen := [name for name in kept if roles[name] == key]:
            section[key] = chosen
    if table.frame[kept].isna().any(axis=None):
        section["missing"] = "mean"
    return left_out


def _role(frame: Any, name: str) -> str:
    """Return number, one_hot or dates, or why a column is left out."""
    if name in row_labels(frame):
        return "contains row numbers"
    filled = frame[name].dropna()
    if filled.empty:
        return "is empty"
    if filled.dtype.kind == "M":
        return "dates"
    texts = filled[np.isnan(as_numbers(filled))].map(str)
    if 2 * len(texts) <= len(filled) or looks_like_numbers(texts):
        return "number"  # the reader refuses what is no number, with its line
    if texts.str.match(r"\d{4}-\d\d-\d\d").all():
        return "dates"
    values = filled.map(str).nunique()
    return "one_hot" if values <= MAX_VALUES else f"has {values:,} different texts"


def _guessed(targets: Array) -> str:
    """Return what targets look like: texts are classes, and so are few whole numbers.

    Numbers are no classes if one of them is there once: no class can be divided then.
    """
    if targets.dtype.kind != "f" or not len(targets):
        return "classification"
    values, counts = np.unique(targets, return_counts=True)
    few = len(values) <= MAX_CLASSES and counts.min() >= MIN_TO_DIVIDE
    whole = np.array_equal(values, np.round(values))
    return "classification" if whole and few else "regression"
