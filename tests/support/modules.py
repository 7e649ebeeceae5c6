"""Torch modules for tests. Import it only where torch is there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flows.workloads.base import DatasetShape
from flows.workloads.torch_module import TorchWorkload


def small(shape: DatasetShape) -> Any:
    """Make a perceptron with one hidden layer."""
    return nn.Sequential(nn.Linear(shape.features, 9), nn.ReLU(), nn.Linear(9, shape.classes))


def perceptron(shape: DatasetShape) -> TorchWorkload:
    """Make a workload of `small`."""
    return TorchWorkload(shape, small)


def tied(shape: DatasetShape) -> Any:
    """Make a module that uses one weight twice, and has a parameter that it does not use."""

    class Tied(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(shape.features, shape.features, bias=False)
            self.again = nn.Linear(shape.features, shape.features, bias=False)
            self.again.weight = self.first.weight
            self.unused = nn.Parameter(torch.ones(3))
            self.last = nn.Linear(shape.features, shape.classes)

        def forward(self, x: Any) -> Any:
            return self.last(torch.tanh(self.again(torch.tanh(self.first(x)))))

    return Tied()


def double(shape: DatasetShape) -> Any:
    """Make a module that computes in float64."""
    return small(shape).double()


def normalised(shape: DatasetShape) -> Any:
    """Make a module that keeps running statistics."""
    return nn.Sequential(nn.Linear(shape.features, shape.classes), nn.BatchNorm1d(shape.classes))


def no_module(shape: DatasetShape) -> Any:
    """Make something else."""
    return "a module"
