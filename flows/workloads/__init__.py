"""Models and data sets: what an experiment trains, and how a name becomes one of them.

A workload is pure arithmetic on named numpy arrays; it knows nothing of servers, shards or faults.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dps.errors import ConfigurationError
from flows.workloads.base import Array as Array
from flows.workloads.base import Arrays as Arrays
from flows.workloads.base import Dataset as Dataset
from flows.workloads.base import DatasetShape as DatasetShape
from flows.workloads.base import Workload as Workload
from flows.workloads.base import batches as batches
from flows.workloads.datasets import SHAPES as SHAPES
from flows.workloads.datasets import DatasetSource as DatasetSource
from flows.workloads.datasets import Part as Part
from flows.workloads.datasets import ensure_dataset as ensure_dataset
from flows.workloads.datasets import find_dataset as find_dataset
from flows.workloads.datasets import load_dataset as load_dataset
from flows.workloads.linear import LinearRegression as LinearRegression
from flows.workloads.logistic import ParityRegression as ParityRegression
from flows.workloads.mlp import MLP as MLP
from flows.workloads.objective import Objective as Objective
from flows.workloads.patches import PatchDataset as PatchDataset
from flows.workloads.rica import Rica as Rica
from flows.workloads.softmax import SoftmaxRegression as SoftmaxRegression
from flows.workloads.with_torch import cnn, torch_module

WORKLOADS: Mapping[str, Callable[..., Workload]] = {
    "mlp": MLP,
    "softmax": SoftmaxRegression,
    "logistic": ParityRegression,
    "linear": LinearRegression,
    "rica": Rica,
    "torch": torch_module,
    "cnn": cnn,
}


def build_workload(kind: str, shape: DatasetShape, **settings: Any) -> Workload:
    """Make the workload that `kind` names, for data of the given shape.

    Parameters
    ----------
    kind
        A key of `WORKLOADS`.
    shape
        Of the data set: `SHAPES[kind of data set]`, or `dataset.shape`.
    settings
        The workload's hyperparameters, such as ``hidden=[64]``; those left out keep their defaults.

    Raises
    ------
    ConfigurationError
        An unknown kind or hyperparameter, or a value that cannot work.
    """
    if kind not in WORKLOADS:
        raise ConfigurationError(f"workload {kind!r} is unknown; {_choices(kind, [*WORKLOADS])}")
    make = WORKLOADS[kind]
    known = [name for name in inspect.signature(make).parameters if name != "shape"]
    for name in settings:
        if name not in known:
            raise ConfigurationError(f"workload {kind} has no {name!r}; {_choices(name, known)}")
    return make(shape, **settings)


def _choices(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
