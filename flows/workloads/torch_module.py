"""Workloads that torch computes: any `nn.Module` with a loss, and the first paper's network.

A module's parameters are the named arrays; a gradient is, bit for bit, what torch itself computes
for the same batch on one thread. torch is imported here and nowhere else, so that only those wait
for it who use it.
"""

from __future__ import annotations

import hashlib
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
from flows.workloads.base import DTYPES, Array, Arrays, DatasetShape, side_of_images
from flows.workloads.losses import EVALUATION_ROWS, r_squared

Module = Any  # an `nn.Module`
Tensors = dict[str, Any]
Factory = Callable[[DatasetShape], Module]
Loss = Callable[[Any, Any], Any]

# Torch's generator and number of threads belong to the process, and so does what guards them.
_LOCK = threading.RLock()


@dataclass(frozen=True)
class TorchWorkload:
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
        """The names of the module's parameters, in its own order."""
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
            found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return loss.item(), dict(zip(leaves, map(_fresh_array, found), strict=True))

    def predict(self, params: Arrays, x: Array) -> Array:
        """Return the module's scores or predictions, examples × classes."""
        tensors = {name: torch.tensor(array) for name, array in params.items()}
        with _LOCK, torch.no_grad(), _one_thread():
            return self._predicted(self._scores(tensors, x, training=False))

    def evaluate(
        self, params: Arrays, x: Array, y: Array, predictions: list[Array] | None = None
    ) -> tuple[float, float]:
        """Return the mean loss and the accuracy; for regression, R²."""
        if not len(y):
            raise ValueError("no examples to evaluate: was this part of the data set loaded?")
        tensors = {name: torch.tensor(array) for name, array in params.items()}
        loss, right, errors = 0.0, 0, []
        with _LOCK, torch.no_grad(), _one_thread():
            for start in range(0, len(y), EVALUATION_ROWS):
                part = y[start : start + EVALUATION_ROWS]
                scores = self._scores(tensors, x[start : start + EVALUATION_ROWS], training=False)
                if predictions is not None:
                    predictions.append(self._predicted(scores))
                scores, labels = self._compared(scores, part)
                loss += float(self.loss(scores, labels)) * len(labels)
                if self.shape.regression:
                    errors.append((scores - labels).numpy())
                else:
                    right += int((scores.argmax(dim=1) == labels).sum())
        share = r_squared(np.concatenate(errors), y) if errors else right / len(y)
        return loss / len(y), share

    def _predicted(self, scores: Any) -> Array:
        """Scores or predictions as arrays, examples × classes."""
        found = _fresh_array(scores)
        return found[:, None] if self.shape.regression and found.ndim == 1 else found

    def _compared(self, scores: Any, y: Array) -> tuple[Any, Any]:
        """What the loss compares: for regression, both of one dimension and dtype."""
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


@dataclass(frozen=True, slots=True)
class ConvNet:
    """Makes the convolutional network of "Training Through Failure": 813,258 parameters at 28 × 28.

    Parameters
    ----------
    relu_logits
        Whether the last layer's scores go through a ReLU, as in the published code. A class whose
        scores are below zero for every example then learns no more.
    """

    relu_logits: bool = False

    def __call__(self, shape: DatasetShape) -> Module:
        """Return the module for square images of this many pixels."""
        side = side_of_images(shape)
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
        if self.relu_logits:
            layers["relu4"] = nn.ReLU()
        return nn.Sequential(layers)


def batch_seed(x: Array, y: Array) -> int:
    """Return what torch's generator is seeded with for the gradient of a batch."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(np.ascontiguousarray(x).data)
    digest.update(np.ascontiguousarray(y).data)
    return int.from_bytes(digest.digest(), "big") >> 1


def _refuse_what_cannot_be_shared(module: Module) -> None:
    for name, parameter in module.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ConfigurationError(f"torch: {name} is {dtype}, expected {' or '.join(DTYPES)}")
    for name, part in module.named_modules():
        if getattr(part, "running_mean", None) is not None:
            raise ConfigurationError(
                f"torch: {name} keeps running statistics, which no gradient carries to the server; "
                "give it track_running_stats=False, or use another normalisation"
            )


def _fresh_array(tensor: Any) -> Array:
    # A copy in C order: gradients may be views of one another, or laid out in any other way.
    array: Array = np.array(tensor.detach().numpy(), order="C", copy=True)
    return array


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Have torch draw from this seed; afterwards its generator goes on as if nothing had been."""
    with _LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """Have torch compute on one thread: a node is one core, and sums come out the same.

    To be used by who holds the lock only.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
