"""Workloads that torch computes: any `nn.Module` with a loss, and the first paper's network.

A module's parameters are the named arrays; a gradient is, bit for bit, what torch itself computes
for the same batch on one thread. torch is imported only here: it takes seconds.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from dps.errors import ConfigurationError
from flows.workloads.base import Array, Arrays, DatasetShape, Predictor

Module = Any  # an `nn.Module`
Tensors = dict[str, Any]
Factory = Callable[[DatasetShape], Module]
Loss = Callable[[Any, Any], Any]

# Torch's generator and number of threads belong to the process, and so does what guards them.
_LOCK = threading.RLock()


@dataclass(frozen=True)
class TorchWorkload(Predictor):
    """A classifier that is a torch module; for regression, one that predicts a number.

    Parameters
    ----------
    shape
        Of the data.
    module
        Makes the module for data of this shape. It gets rows of float32, one per example, and
        returns a row of scores for each.
    loss
        Returns the mean loss over a batch, given scores and classes, or for regression
        predictions and targets, both of one dimension.

    Notes
    -----
    What a module draws at random while it trains, such as dropout, depends on the batch alone
    (`batch_seed`): the same batch is treated in the same way under every strategy.
    """

    name: ClassVar[str] = "torch"
    shape: DatasetShape
    module: Factory
    loss: Loss = nn.functional.cross_entropy

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the module behind: another process makes its own."""
        return TorchWorkload, (self.shape, self.module, self.loss)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the module's parameters, in the module's order."""
        return tuple(self.initial(np.random.default_rng(0)))

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Draw initial parameters as the module itself does."""
        with _seeded(int(rng.integers(1 << 63))):
            module = self._make()
        return {name: _fresh_array(tensor) for name, tensor in module.named_parameters()}

    def gradient(self, params: Arrays, x: Array, y: Array) -> tuple[float, Arrays]:
        """Return the mean loss over the batch, and the gradients, as torch computes them."""
        leaves = {name: torch.tensor(array, requires_grad=True) for name, array in params.items()}
        with _seeded(batch_seed(x, y)), _one_thread():
            scores = self._scores(leaves, x, training=True)
            loss = self.loss(*self._compared(scores, y))
            gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return loss.item(), dict(zip(leaves, map(_fresh_array, gradients), strict=True))

    def predict(self, params: Arrays, x: Array) -> Array:
        """Return the module's scores or predictions, examples × classes."""
        tensors = {name: torch.tensor(array) for name, array in params.items()}
        with _LOCK, torch.no_grad(), _one_thread():
            scores = _fresh_array(self._scores(tensors, x, training=False))
        return scores[:, None] if self.shape.regression and scores.ndim == 1 else scores

    def mean_loss(self, params: Arrays, x: Array, y: Array, predictions: Array) -> float:
        """Return the mean loss over examples."""
        with _LOCK, torch.no_grad(), _one_thread():
            return float(self.loss(*self._compared(torch.tensor(predictions), y)))

    def _compared(self, scores: Any, y: Array) -> tuple[Any, Any]:
        """Return the arguments of the loss: for regression, both of one dimension and dtype."""
        if not self.shape.regression:
            return scores, torch.tensor(y)
        return scores.reshape(len(y)), torch.tensor(y, dtype=scores.dtype)

    @cached_property
    def _skeleton(self) -> Module:
        """A module whose own parameters are not used: those of each call take their place."""
        with _seeded(0):
            return self._make()

    def _make(self) -> Module:
        module = self.module(self.shape)
        if not isinstance(module, nn.Module):
            raise ConfigurationError(
                f"torch: {self.module!r} made {type(module).__name__}, expected an nn.Module"
            )
        _refuse_what_cannot_be_shared(module)
        return module

    def _scores(self, tensors: Tensors, x: Array, training: bool) -> Any:
        inputs = torch.tensor(x, dtype=next(iter(tensors.values())).dtype)
        self._skeleton.train(training)
        return torch.func.functional_call(self._skeleton, tensors, (inputs,))


def conv_net(shape: DatasetShape) -> Module:
    """Make the convolutional network of "Training Through Failure": 813,258 parameters at 28 × 28.

    Examples are square images whose side is a multiple of 4.
    """
    side = math.isqrt(shape.features)
    layers = OrderedDict[str, Any](
        image=nn.Unflatten(1, (1, side, side)),
        conv1=nn.Conv2d(1, 16, 3, padding=1),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(16, 32, 3, padding=1),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flat=nn.Flatten(),
        dense1=nn.Linear(32 * (side // 4) ** 2, 512),
        relu3=nn.ReLU(),
        dropout=nn.Dropout(0.25),
        dense2=nn.Linear(512, shape.classes),
    )
    return nn.Sequential(layers)


def batch_seed(x: Array, y: Array) -> int:
    """Return what torch's generator is seeded with for the gradient of a batch."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(np.ascontiguousarray(x).data)
    digest.update(np.ascontiguousarray(y).data)
    return int.from_bytes(digest.digest(), "big") >> 1


def _refuse_what_cannot_be_shared(module: Module) -> None:
    for name, part in module.named_modules():
        if getattr(part, "running_mean", None) is not None:
            raise ConfigurationError(
                f"torch: {name} has running statistics, which gradients do not send to the server; "
                "set track_running_stats=False, or use another normalisation"
            )


def _fresh_array(tensor: Any) -> Array:
    # A copy in C order: gradients may be views of one another, or laid out in any other way.
    array: Array = np.array(tensor.detach().numpy(), order="C", copy=True)
    return array


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's generator, and restore its state afterwards."""
    with _LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread (a node is one core, and sums are reproducible); needs the lock."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
