"""A file of one's own for `dps new`: what kind of file it is, what is in it, and how it is learnt.

The file is read by the readers that a configuration has, so that what is wrong in it is said before
anything is written. What is found out by looking is written down, where it can be changed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from flows.readers.tables import Table
    from flows.workloads.own_data import FileDataset, Format, Loaded

Task = Literal["classification", "regression"]
TASKS: tuple[Task, ...] = get_args(Task)

MOST_CLASSES = 20  # whole numbers that are taken for classes, if nothing is said
MOST_LISTED = 20  # columns in a message
MOST_REASONS = 5
MOST_TOLD = 400  # characters of a comment
WIDTH = 94  # of its lines
FASTEST = 0.1  # learning rate
BATCH = 32
SVMLIGHT = (".svm", ".svmlight", ".libsvm")
SUFFIXES: Mapping[Format, tuple[str, ...]] = {
    "csv": (".csv", ".tsv", ".csv.gz", ".tsv.gz"),
    "parquet": (".parquet",),
    "npz": (".npz",),
    "svmlight": (*SVMLIGHT, *(f"{end}.gz" for end in SVMLIGHT)),
}
TABLES: tuple[Format, ...] = ("csv", "parquet")


@dataclass(frozen=True, slots=True)
class Columns:
    """What is known of a file before it is known what is to be predicted.

    Attributes
    ----------
    path
        Where it is, seen from here.
    kind
        Of the file, as `dataset.kind` names it.
    delimiter
        Between the cells of CSV.
    columns
        Those of a table: for each None, or why nothing can be learnt from it.
    """

    path: Path
    kind: Format
    delimiter: str = ","
    columns: Mapping[str, str | None] | None = None


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of examples, and what is to be predicted.

    Attributes
    ----------
    kind, path, delimiter, target, task
        As the section `dataset` has them; `path` is relative to the configuration's folder.
    guessed
        Whether the task may be the other one, for nobody has said it, and targets are numbers.
    left_out
        Columns that nothing can be learnt from, each with the reason.
    features
        The columns that are left, if there are any that are left out; None: all but the target.
    told
        What is in the file, in a line.
    rows
        How many there are to train on.
    classes
        How many; 1 where numbers are predicted.
    sparse
        Whether its rows are sparse.
    note
        What was assumed about the file.
    deviation
        The standard deviation of numbers that are to be predicted; 1 for classes.
    learning_rate
        One that least squares do not diverge with.
    """

    kind: Format
    path: str
    delimiter: str
    target: str | None
    task: Task
    guessed: bool
    left_out: Mapping[str, str]
    features: tuple[str, ...] | None
    told: str
    rows: int
    classes: int
    sparse: bool
    note: str
    deviation: float
    learning_rate: float

    @property
    def score(self) -> str:
        """What models of it are scored by."""
        if self.task == "regression":
            return "rmse"
        return "auc" if self.classes == 2 else "accuracy"

    @property
    def models(self) -> tuple[str, ...]:
        """The workloads of dps that can be trained on it, the usual one first."""
        if self.task == "regression":
            return ("linear", "mlp")
        return ("mlp", "softmax", "logistic") if self.classes == 2 else ("mlp", "softmax")

    @property
    def batch_size(self) -> int:
        """How many examples a gradient is of."""
        return min(BATCH, self.rows)

    def document(self) -> dict[str, Any]:
        """What was chosen, as `--json` has it."""
        return {
            "kind": self.kind,
            "path": self.path,
            "target": self.target,
            "task": self.task,
            "features": self.features,
            "left_out": self.left_out,
            "metric": self.score,
        }


def found_columns(path: Path) -> Columns:
    """Look at a file: its kind, and the columns if it is a table.

    Raises
    ------
    ConfigurationError
        It is of no kind that can be read, is not there, or its columns cannot be read.
    """
    from flows.readers.tables import csv_delimiter, csv_table, parquet_table
    from flows.workloads.known_file import KnownFile

    # Unlike that of pathlib, it leaves the name of a user whom nobody knows as it is.
    path = Path(os.path.expanduser(path))
    kind = _kind(path)
    KnownFile.found(str(path))
    if kind == "csv":
        delimiter = csv_delimiter(path)
        return Columns(path, kind, delimiter, _objections(csv_table(path, delimiter)))
    if kind == "parquet":
        return Columns(path, kind, columns=_objections(parquet_table(path)))
    return Columns(path, kind)


def data_file(found: Columns, target: str | None, task: Task | None, folder: Path) -> DataFile:
    """Return what can be learnt from a file.

    Parameters
    ----------
    found
        The file.
    target
        The column or array that is to be predicted; svmlight has none.
    task
        None: it is guessed from the targets.
    folder
        Of the configuration, which paths are relative to.

    Raises
    ------
    ConfigurationError
        There is no such target, it does not suit the task, or something in the file is wrong.
    """
    import numpy as np

    from flows.workloads.own_data import Preparation, divided, examples_of

    target = _target(found, target)
    others = {name: reason for name, reason in (found.columns or {}).items() if name != target}
    left_out = {name: reason for name, reason in others.items() if reason}
    kept = tuple(name for name in others if name not in left_out) if left_out else None
    _must_have_features(found.path, kept, left_out)
    source = _source(found, target, kept, task)
    parts = examples_of(source)
    examples = parts[0]
    chosen = task or guessed(examples.y)
    # As the section that is written prepares it, but for targets, which are told in their own unit.
    dense = isinstance(examples.x, np.ndarray)
    preparation = Preparation(standardise=dense, regression=chosen == "regression")
    data = divided(found.path.name, parts, source.split, preparation)
    return DataFile(
        kind=found.kind,
        path=_seen_from(found.path, folder),
        delimiter=found.delimiter,
        target=target,
        task=chosen,
        guessed=task is None and examples.y.dtype.kind == "f",
        left_out=left_out,
        features=kept,
        told=data.told(),
        rows=len(data.data.y_train),
        classes=data.shape.classes,
        sparse=data.shape.sparse,
        note=data.note,
        deviation=data.target_deviation or 1.0,
        learning_rate=_learning_rate(data, chosen),
    )


def guessed(targets: npt.NDArray[np.generic]) -> Task:
    """Return what targets look like: texts are classes, and so are few whole numbers.

    Numbers are none if one of them is there once: no class can be divided then.
    """
    import numpy as np

    from flows.workloads.own_data import LEAST_TO_DIVIDE

    if targets.dtype.kind != "f":
        return "classification"
    values, counts = np.unique(targets, return_counts=True)
    whole = np.array_equal(values, np.round(values))
    few = len(values) <= MOST_CLASSES and counts.min() >= LEAST_TO_DIVIDE
    return "classification" if whole and few else "regression"


def told(data: DataFile) -> Iterator[str]:
    """Yield what was found in a file, and what follows from it, for who has named it."""
    from flows.quoting import quoted

    yield data.told
    if data.guessed:
        other = TASKS[1 - TASKS.index(data.task)]
        yield f"Taken for {data.task}, by the target; give --task {other} if it is that"
    if data.kind == "svmlight":
        yield "If its indices begin with another number, set dataset.zero_based in the file"
    if data.left_out:
        reasons = [f"{quoted(name)} {reason}" for name, reason in data.left_out.items()]
        more = f"; and {len(reasons) - MOST_REASONS:,} more" if len(reasons) > MOST_REASONS else ""
        yield f"Left out: {'; '.join(reasons[:MOST_REASONS])}{more}"


def section(data: DataFile) -> str:
    """Return the section `dataset` of a configuration, with a comment on every choice."""
    return "\n".join(["dataset:", *(f"  {line}" for line in _lines(data))])


# -- what is there ---------------------------------------------------------------------------------


def _kind(path: Path) -> Format:
    from dps.errors import ConfigurationError
    from flows.readers.files import files_of
    from flows.readers.tables import PARTS

    if path.is_dir():
        names = [file.name for file in files_of(path)]
        kinds = [kind for kind in TABLES if any(name.endswith(PARTS[kind]) for name in names)]
    else:
        kinds = [kind for kind, ends in SUFFIXES.items() if path.name.lower().endswith(ends)]
    if kinds:
        return kinds[0]
    raise ConfigurationError(
        f"{path}: expected a file whose name ends in {', '.join(chain(*SUFFIXES.values()))}, or a "
        f"folder with files in {' or '.join(PARTS.values())}; docs/howto/own-data.md says what may "
        "be in them, and how a function of yours reads others"
    )


def _objections(table: Table) -> dict[str, str | None]:
    """The columns: for each None, or why nothing can be learnt from it."""
    from flows.readers.tables import require
    from flows.readers.values import objection

    require(table, table.names, "features")
    reasons = {name: objection(table.frame[name]) for name in table.names}
    return {**reasons, **table.row_labels()}


def _target(found: Columns, target: str | None) -> str | None:
    from dps.errors import ConfigurationError
    from flows.quoting import listed, quoted

    if found.kind == "svmlight":
        if target is not None:
            raise ConfigurationError(
                f"--target {target}: {found.path} is svmlight, whose lines begin with the target; "
                "leave it out"
            )
        return None
    if found.kind == "npz":
        return target or "y"
    columns = [*(found.columns or ())]
    if target is None:
        raise ConfigurationError(
            f"--target: which column of {found.path} is to be predicted? There are: "
            f"{listed(map(quoted, columns), MOST_LISTED)}"
        )
    return target


def _must_have_features(
    path: Path, kept: tuple[str, ...] | None, left_out: Mapping[str, str]
) -> None:
    from dps.errors import ConfigurationError
    from flows.quoting import quoted

    if kept == ():
        name, reason = next(iter(left_out.items()))
        raise ConfigurationError(
            f"{path}: no column of numbers is left to learn from: {quoted(name)} {reason}; write "
            "texts as numbers, such as a column of 0 and 1 for each value"
        )


def _source(
    found: Columns, target: str | None, features: tuple[str, ...] | None, task: Task | None
) -> FileDataset:
    from flows.workloads.known_file import KnownFile
    from flows.workloads.own_data import FileDataset, Preparation

    return FileDataset(
        found.kind,
        KnownFile.found(str(found.path.absolute())),
        target=target,
        features=("x",) if found.kind == "npz" else features,
        delimiter=found.delimiter,
        preparation=Preparation(regression=task == "regression"),
    )


def _learning_rate(data: Loaded, task: Task) -> float:
    """Half of what the steps of least squares are stable with, whatever the batch."""
    import numpy as np

    if task == "classification":
        return FASTEST
    x = data.data.x_train
    values = x if isinstance(x, np.ndarray) else x.data
    square = float(np.vdot(values, values)) / len(data.data.y_train)
    return float(f"{min(FASTEST, 0.5 / max(square, 1e-9)):.1g}")


def _seen_from(path: Path, folder: Path) -> str:
    """A path as a configuration in `folder` names it."""
    if path.is_absolute() or folder == Path():
        return str(path)
    return os.path.relpath(path.resolve(), folder.resolve())


# -- the text --------------------------------------------------------------------------------------


def _lines(data: DataFile) -> Iterator[str]:
    from flows.quoting import shown

    yield from (f"# {line}" for line in wrap(shown(data.told, MOST_TOLD), WIDTH))
    yield f"kind: {data.kind}"
    whence = "" if Path(data.path).is_absolute() else "  # relative to this file"
    yield f"path: {_scalar(data.path)}{whence}"
    if data.kind == "svmlight":
        yield f"zero_based: auto  # {data.note}; true: with 0, false: with 1"
    if data.delimiter != ",":
        yield f"delimiter: {json.dumps(data.delimiter)}"
    if data.target is not None:
        what = "column" if data.kind in TABLES else "array"
        yield f"target: {_scalar(data.target)}  # the {what} that is to be predicted"
    yield from _task(data)
    yield from _features(data)
    rows = "rows of each class" if data.task == "classification" else "rows"
    yield f"# A fifth of the {rows} scores models and is not trained on; `seed` draws it."
    yield "split: {test: 0.2, seed: 0}"
    if data.sparse:
        yield "# Sparse rows are taken as they are. With few features give dense: true, and"
        yield "# standardise: true, which gives each the mean 0 and the standard deviation 1."
    else:
        yield "# Each feature gets the mean 0 and the standard deviation 1, by the rows that are"
        yield "# trained on."
        yield "standardise: true"
    if data.task == "regression":
        yield "standardise_target: true  # the target as well; the score stays in its own unit"


def _task(data: DataFile) -> Iterator[str]:
    other = TASKS[1 - TASKS.index(data.task)]
    what = {"classification": "classes", "regression": "numbers"}
    if data.guessed:
        yield f"# Guessed from the target. To predict {what[other]}, run `dps new` again with"
        yield f"# --task {other}: model, score and claims are others then."
    yield f"task: {data.task}  # {what[data.task]} are predicted"


def _features(data: DataFile) -> Iterator[str]:
    from flows.quoting import shown

    if data.features is None:
        if data.kind in TABLES:
            yield "# The features are all other columns. To leave some out, such as the number of a"
            yield "# customer, list those to keep: features: [a, b]"
        return
    yield "# The features; take out what should tell nothing, such as the number of a customer."
    yield "# These columns are left out:"
    for name, reason in data.left_out.items():
        yield f"#   {shown(json.dumps(name, ensure_ascii=False))} {reason}"
    yield "features:"
    yield from (f"  - {_scalar(name)}" for name in data.features)


def _scalar(text: str) -> str:
    """A text as YAML has it: in quotes, where it might be read as something else."""
    import yaml

    from flows.quoting import visible

    plain = re.fullmatch(r"[A-Za-z_./][\w./ -]*(?<! )", text, re.ASCII)
    if plain and yaml.safe_load(text) == text:
        return text
    return visible(json.dumps(text, ensure_ascii=False))  # its escapes are those of YAML as well
