"""The losses that workloads share, and the evaluation of models in chunks of examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def kept(
    predicted_of: Callable[[Any], Array], predictions: list[Array] | None
) -> Callable[[Any], Array]:
    """Return what predicts the same, and appends a copy of it to `predictions`, if there are."""
    if predictions is None:
        return predicted_of

    def predict(x: Any) -> Array:
        found = predicted_of(x)
        predictions.append(found.copy())  # who is given it may compute in place
        return found

    return predict


def squared_gradient(predicted: Array, y: Array) -> float:
    """Return half the mean squared error, and turn predictions into its gradient in place."""
    predicted -= y.astype(predicted.dtype, copy=False).reshape(predicted.shape)
    loss = 0.5 * float(np.mean(predicted**2, dtype=np.float64))
    predicted /= len(y)
    return loss


def evaluate_regression(
    predicted_of: Callable[[Any], Array], x: Any, y: Array
) -> tuple[float, float]:
    """Return half the mean squared error, and R², given how predictions are made."""
    errors = predicted(predicted_of, x, y).reshape(len(y)).astype(np.float64) - y
    return 0.5 * float(np.mean(errors**2)), r_squared(errors, y)


def predicted(predicted_of: Callable[[Any], Array], x: Any, y: Array) -> Array:
    """Return what is predicted for all examples, of which there is one at least, in chunks."""
    if not len(y):
        raise ValueError("no examples to evaluate: was this part of the data set loaded?")
    starts = range(0, len(y), EVALUATION_ROWS)
    return np.concatenate([predicted_of(x[start : start + EVALUATION_ROWS]) for start in starts])


def r_squared(errors: Array, y: Array) -> float:
    """Return the share of the variance of `y` that is explained, 0 where errors are larger."""
    variance = float(np.sum((y.astype(np.float64) - y.mean(dtype=np.float64)) ** 2))
    unexplained = float(np.sum(errors.astype(np.float64) ** 2))
    if not variance or not unexplained < variance:  # also where it is not finite
        return 0.0
    return 1 - unexplained / variance


def rmse(predictions: Array, y: Array) -> float:
    """Return the root of the mean squared error of predictions, one for each example."""
    errors = predictions.reshape(len(y)).astype(np.float64) - y
    return float(np.sqrt(np.mean(errors**2)))


def auc(scores: Array, y: Array) -> float:
    """Return the area under the ROC curve, given a score for each example, and 0 or 1.

    0 where scores are not finite.

    Raises
    ------
    ValueError
        Examples are all of one class.
    """
    positive = int(np.count_nonzero(y))
    negative = len(y) - positive
    if not positive or not negative:
        raise ValueError("AUC needs examples of both classes")
    if not np.isfinite(scores).all():
        return 0.0
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[place]  # of equal scores, the mean of theirs
    above = float(ranks[y > 0].sum()) - positive * (positive + 1) / 2
    return above / (positive * negative)
