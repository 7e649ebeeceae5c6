"""The factor model of users and items, its objective, and a reference solution.

A user's row is (p, b), an item's (q, c): vectors of the same length and a bias each. The reference
is alternating least squares: for fixed rows of all items, the best rows of users solve small linear
equations, and vice versa (Zhou et al. 2008).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from examples.ratings import Prepared, Ratings

Array = npt.NDArray[np.floating]

PENALTY = 0.05  # λ, where ratings have variance 1


def predict(users: Array, items: Array) -> Array:
    """Return b + c + p·q for each pair of rows."""
    return np.asarray((users[:, :-1] * items[:, :-1]).sum(1) + users[:, -1] + items[:, -1])


def objective(users: Array, items: Array, values: Array) -> tuple[float, Array, Array]:
    """Return Σ ½·(e² + λ·(‖p‖² + b² + ‖q‖² + c²)) over some ratings, and its gradients.

    Parameters
    ----------
    users, items
        (ratings, length + 1): the rows of the user and of the item of each rating.
    values
        (ratings,), of the same dtype. e is how far the prediction is above it.

    Returns
    -------
    value
        The sum.
    by_users, by_items
        Like `users` and `items`. The gradient of a user's row is the sum over all its ratings.
    """
    errors = (predict(users, items) - values)[:, None]
    total = 0.5 * (np.sum(errors**2) + PENALTY * (np.sum(users**2) + np.sum(items**2)))
    by_users = errors * _facing(items) + PENALTY * users
    by_items = errors * _facing(users) + PENALTY * items
    return float(total), by_users, by_items


@dataclass(frozen=True, eq=False)
class Factors:
    """Return a row for each user and each item of the ratings, in the order of their keys."""

    of: Prepared
    users: Array
    items: Array

    def rmse(self) -> float:
        """Return the root mean square error on held-out ratings, in the units of the ratings."""
        errors = predict(*self._rows(self.of.held_out)) - self.of.held_out.values
        return float(self.of.scale * np.sqrt(np.mean(errors**2)))

    def objective(self) -> float:
        """Return the mean objective over the training ratings."""
        learn = self.of.learn
        return objective(*self._rows(learn), learn.values)[0] / len(learn)

    def _rows(self, ratings: Ratings) -> tuple[Array, Array]:
        user, item = self.of.positions(ratings)
        return self.users[user], self.items[item]


def alternate(start: Factors, sweeps: int) -> Factors:
    """Solve for all users and then for all items, repeatedly, in one process."""
    learn, found = start.of.learn, start
    user, item = start.of.positions(learn)
    shape = len(start.users), len(start.items)
    rated = csr_array((np.ones(len(learn)), (user, item)), shape)
    of_items = rated.T.tocsr()
    for _ in range(sweeps):
        rest = csr_array((learn.values - found.items[item, -1], (user, item)), shape)
        found = replace(found, users=_best(rated, rest, found.items))
        rest = csr_array((learn.values - found.users[user, -1], (item, user)), shape[::-1])
        found = replace(found, items=_best(of_items, rest, found.users))
    return found


def _best(rated: csr_array, rest: csr_array, others: Array) -> Array:
    """The best rows of one side for the rows of the other.

    Parameters
    ----------
    rated
        This side × the other side: number of ratings of each pair.
    rest
        The sums of these ratings minus the bias of the other side.
    """
    facing = _facing(others)
    length = facing.shape[1]
    products = (facing[:, :, None] * facing[:, None, :]).reshape(len(facing), -1)
    equations = (rated @ products).reshape(-1, length, length)
    equations += PENALTY * rated.sum(axis=1)[:, None, None] * np.eye(length)
    return np.asarray(np.linalg.solve(equations, (rest @ facing)[:, :, None])[:, :, 0])


def _facing(rows: Array) -> Array:
    """Return rows with 1 instead of the bias, the factors of a row of the other side."""
    return np.concatenate([rows[:, :-1], np.ones_like(rows[:, -1:])], axis=1)
