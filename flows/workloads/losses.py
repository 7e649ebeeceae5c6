"""The softmax cross-entropy that the classifiers share, and their evaluation in chunks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flows.workloads.base import Array

EVALUATION_ROWS = 1024  # keeps a chunk's activations in cache, and memory independent of the data


def cross_entropy(logits: Array, y: Array) -> Array:
    """Return each example's cross-entropy, and turn `logits` into probabilities in place."""
    logits -= logits.max(axis=1, keepdims=True)
    of_class = logits[np.arange(len(y)), y]
    np.exp(logits, out=logits)
    total = logits.sum(axis=1)
    logits /= total[:, None]
    losses: Array = np.log(total) - of_class
    return losses


def cross_entropy_gradient(logits: Array, y: Array) -> float:
    """Return the mean cross-entropy, and turn `logits` into its gradient for them in place."""
    losses = cross_entropy(logits, y)
    logits[np.arange(len(y)), y] -= 1
    logits /= len(y)
    return float(losses.mean(dtype=np.float64))


def evaluate(logits_of: Callable[[Array], Array], x: Array, y: Array) -> tuple[float, float]:
    """Return mean cross-entropy and accuracy of a classifier, given how it makes fresh logits."""
    if not len(y):
        raise ValueError("no examples to evaluate: was this part of the data set loaded?")
    loss, right = 0.0, 0
    for start in range(0, len(y), EVALUATION_ROWS):
        labels = y[start : start + EVALUATION_ROWS]
        logits = logits_of(x[start : start + EVALUATION_ROWS])
        right += int(np.count_nonzero(logits.argmax(axis=1) == labels))
        loss += float(cross_entropy(logits, labels).sum(dtype=np.float64))
    return loss / len(y), right / len(y)
