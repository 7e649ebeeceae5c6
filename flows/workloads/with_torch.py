"""Workloads that need torch, an extra, without importing it before it is needed: it takes seconds.

A module and a loss are named as "package.module:name", as in setuptools' entry points; packages in
the working directory are found as well.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from dps.errors import ConfigurationError
from flows.workloads.base import DatasetShape, Workload
from flows.workloads.own_code import module_and_name, refusing

CROSS_ENTROPY = "torch.nn.functional:cross_entropy"
SQUARED = "torch.nn.functional:mse_loss"
PRELOAD = ("flows.workloads.torch_module",)  # for processes that are forked, so that each has it


def torch_module(shape: DatasetShape, module: str, loss: str = CROSS_ENTROPY) -> Workload:
    """Make a workload of a torch module.

    Raises `ConfigurationError` if torch is not installed, or there is nothing of such a name.

    Parameters
    ----------
    shape
        Of the data.
    module
        Names a callable that makes the `nn.Module` for data of a `DatasetShape`. The module gets
        examples as rows of float32 and returns one row of scores, one per class, for each.
    loss
        Names a callable that returns the mean loss over a batch, given scores and int64 classes;
        or, for regression, predictions and targets, where the mean squared error is the default.
    """
    if shape.regression and loss == CROSS_ENTROPY:
        loss = SQUARED  # the default for numbers
    make, measure = find(module), find(loss)
    from flows.workloads.torch_module import TorchWorkload

    return TorchWorkload(shape, make, measure)


def need_torch() -> None:
    """Raise `ConfigurationError`, with the command that installs torch, if torch is missing."""
    if find_spec("torch") is None:
        raise ConfigurationError(
            "this experiment needs torch, which is not installed: pip install torch"
        )


def find(reference: str) -> Any:
    """Return the callable that "package.module:name" names.

    Raises `ConfigurationError` if torch is not installed, the module fails, there is nothing of
    this name, or it cannot be called.
    """
    need_torch()
    place, name = module_and_name(reference)
    path = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        with refusing(reference):
            member = getattr(import_module(place), name)
    finally:
        sys.path[:] = path
    if not callable(member):
        raise ConfigurationError(f"{reference!r} is {type(member).__name__}, expected a callable")
    return member
