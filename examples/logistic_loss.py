"""The arithmetic of L1-logistic regression on examples that are divided over workers.

With rows z (features times label, see `examples.sparse_data`), N examples in all and the
scores m = z·w, the objective is P(w) = (1/N)·Σ log(1 + exp(−m)) + λ·‖w‖₁.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csc_array, csr_array, vstack
from scipy.sparse.linalg import LinearOperator, eigsh
from scipy.special import entr, expit

from examples.sparse_data import Source

if TYPE_CHECKING:
    from distributed import Client

Array = npt.NDArray[np.float64]
Arrays = dict[str, Array]

NORM_TOLERANCE = 0.01
SMALLEST = 10  # features, for which Lanczos iterations are worth it


class Share:
    """One worker's examples, as a matrix for each piece and each block of features.

    Parameters
    ----------
    pieces
        Rows times labels, examples × features.
    blocks
        Name → the columns of a block.
    examples
        N, of all workers together.
    """

    def __init__(
        self, pieces: Iterable[csr_array], blocks: Mapping[str, slice], examples: int
    ) -> None:
        self._examples = examples
        self._pieces: list[dict[str, csc_array]] = [
            {name: piece[:, columns].tocsc() for name, columns in blocks.items()}
            for piece in pieces
        ]
        self._scores = [np.zeros(next(iter(p.values())).shape[0]) for p in self._pieces]
        self._seen = {name: np.zeros(c.stop - c.start) for name, c in blocks.items()}

    @property
    def nbytes(self) -> int:
        """Memory of the examples, in bytes."""
        matrices = [matrix for piece in self._pieces for matrix in piece.values()]
        return sum(m.data.nbytes + m.indices.nbytes + m.indptr.nbytes for m in matrices)

    def follow(self, weights: Mapping[str, Array]) -> None:
        """Update the scores for new weights, by the columns whose weights changed."""
        for name, seen in self._seen.items():
            difference = weights[name] - seen
            changed = np.flatnonzero(difference)
            few = 4 * len(changed) < len(seen)
            for scores, piece in zip(self._scores, self._pieces, strict=True):
                if few:
                    scores += piece[name][:, changed] @ difference[changed]
                else:
                    scores += piece[name] @ difference
            self._seen[name] = weights[name]

    def gradient(self, name: str) -> Array:
        """Return this share's part of the gradient of the mean loss, for one block."""
        total = np.zeros(len(self._seen[name]))
        for scores, piece in zip(self._scores, self._pieces, strict=True):
            total -= piece[name].T @ expit(-scores)
        return total / self._examples

    def part(self) -> Part:
        """Return this share's part of the objective and its bound."""
        scores = np.concatenate([*self._scores, np.zeros(0)])
        gradient = np.concatenate([self.gradient(name) for name in self._seen])
        size = sum(float(np.abs(weights).sum()) for weights in self._seen.values())
        return Part(float(np.logaddexp(0, -scores).sum()), size, gradient, expit(-scores))

    def norms(self) -> Array:
        """‖Z_bᵀ·Z_c‖₂ for all blocks b, c: blocks × blocks, to a few percent, not below."""
        names = list(self._seen)
        found = np.zeros((len(names), len(names)))
        for b, c in combinations_with_replacement(range(len(names)), 2):
            found[b, c] = found[c, b] = self._norm(names[b], names[c])
        return found

    def _norm(self, b: str, c: str) -> float:
        """The largest singular value of Z_bᵀ·Z_c, which is that of Z_cᵀ·Z_b as well."""
        if len(self._seen[c]) > len(self._seen[b]):
            b, c = c, b
        size = len(self._seen[c])

        def through(v: Array, first: str, second: str) -> Array:
            total = np.zeros(len(self._seen[second]))
            for piece in self._pieces:
                total += piece[second].T @ (piece[first] @ v)
            return total

        if size < SMALLEST:
            columns = [through(unit, c, b) for unit in np.eye(size)]
            return float(np.linalg.norm(np.stack(columns), 2))

        def squared(v: Array) -> Array:
            return through(through(v, c, b), b, c)

        start = np.random.default_rng(0).standard_normal(size)
        if not squared(start).any():  # no examples, or none with features of both blocks
            return 0.0
        operator = LinearOperator((size, size), matvec=squared, dtype=np.float64)
        (largest,) = eigsh(operator, 1, v0=start, tol=NORM_TOLERANCE, return_eigenvectors=False)
        return float(np.sqrt(largest * (1 + NORM_TOLERANCE)))


@dataclass(frozen=True, eq=False)
class Part:
    """One share's sum of losses, gradient of the mean loss, and dual variables σ(−m).

    `size` is ‖w‖₁, the same for every share.
    """

    loss: float
    size: float
    gradient: Array
    dual: Array


def objective_and_bound(parts: Sequence[Part], penalty: float) -> tuple[float, float]:
    """Return P(w) and a lower bound of its minimum.

    The dual problem is to maximise (1/N)·Σ H(u), with the entropy H(u) = −u·log u − (1−u)·log(1−u),
    over u in [0, 1] for which no element of (1/N)·Σ u·z is beyond ±λ. Every such u gives a lower
    bound of P; σ(−m) does, scaled down until it is one (Koh, Kim and Boyd 2007, section 2.2).
    """
    examples = sum(len(part.dual) for part in parts)
    largest = np.abs(np.sum([part.gradient for part in parts], axis=0)).max()
    scale = min(1.0, penalty / largest) if largest > 0 else 1.0
    dual = sum(float((entr(scale * p.dual) + entr(1 - scale * p.dual)).sum()) for p in parts)
    loss = sum(part.loss for part in parts)
    size = sum(part.size for part in parts) / len(parts)
    return loss / examples + penalty * size, dual / examples


# -- spread over the nodes -------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Examples divided over workers, and features divided into blocks."""

    source: Source
    blocks: dict[str, slice]
    workers: int

    @classmethod
    def of(cls, source: Source, blocks: int, workers: int) -> Spread:
        """Divide the features into at most `blocks` blocks of equal size, "w0", "w1" and so on."""
        blocks = min(blocks, source.features)
        cuts = [source.features * b // blocks for b in range(blocks + 1)]
        return cls(source, {f"w{b}": slice(*c) for b, c in enumerate(pairwise(cuts))}, workers)

    @property
    def zeros(self) -> dict[str, Array]:
        """Weights before training."""
        return {
            name: np.zeros(columns.stop - columns.start) for name, columns in self.blocks.items()
        }

    def share(self, index: int) -> Share:
        """Make or read one worker's share."""
        pieces = self.source.share(index, self.workers)
        return Share(pieces, self.blocks, self.source.examples)

    def constants(self, client: Client) -> tuple[Array, Array]:
        """Return a bound of the curvature of the loss, and its gradient at w = 0.

        Returns
        -------
        curvature
            Maximum change of the gradient of block b per unit of change of block c: blocks ×
            blocks, ‖Z_bᵀZ_c‖₂ / 4N, summed over the shares.
        gradient
            Of the mean loss, of all features.
        """
        norms, gradients = zip(*self._on_nodes(client, _constants), strict=True)
        return np.sum(norms, axis=0) / (4 * self.source.examples), np.sum(gradients, axis=0)

    def judge(
        self, client: Client, weights: Mapping[str, Array], penalty: float
    ) -> tuple[float, float]:
        """Return `objective_and_bound` at these weights, from new copies of the shares."""
        return objective_and_bound(self._on_nodes(client, _part, weights), penalty)

    def _on_nodes(self, client: Client, function: Any, *arguments: Any) -> list[Any]:
        """Call a function for each share, on any node."""
        shares = range(self.workers)
        calls = [client.submit(function, self, i, *arguments, pure=False) for i in shares]
        return list(client.gather(calls))


def _constants(spread: Spread, index: int) -> tuple[Array, Array]:
    share = spread.share(index)
    return share.norms(), share.part().gradient


def _part(spread: Spread, index: int, weights: Mapping[str, Array]) -> Part:
    share = spread.share(index)
    share.follow(weights)
    return share.part()


def liblinear(spread: Spread, penalty: float) -> Arrays:
    """Return the weights of scikit-learn for the same problem, by another method."""
    from sklearn.linear_model import LogisticRegression

    x = vstack(list(spread.source.share(0, 1)), format="csr")
    # The rows are times their labels already; half are turned over to have examples of two classes.
    labels = np.where(np.arange(x.shape[0]) % 2, 1.0, -1.0)
    x.data *= np.repeat(labels, np.diff(x.indptr))
    model = LogisticRegression(
        l1_ratio=1,
        solver="liblinear",
        C=1 / (penalty * x.shape[0]),
        fit_intercept=False,
        tol=1e-6,
        max_iter=10_000,
        random_state=0,
    )
    weights = model.fit(x, labels).coef_[0]
    return {name: weights[columns] for name, columns in spread.blocks.items()}
