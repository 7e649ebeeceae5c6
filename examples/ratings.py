"""The ratings to factorise: the user's file, or pixels of images.

By default, an image "rates" its pixels, because an installation has images but no ratings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dps import ConfigurationError
from examples.images import fashion, images_of
from flows.readers import numbers, read_csv, read_parquet

DRAWN = {"digits": 44, "Fashion-MNIST": 40}  # pixels for each image, some of them twice
HELD_OUT = 10  # one of so many ratings


# The names that the columns of users, items and ratings may have.
COLUMNS = (
    ("user", "user_id", "userId"),
    ("item", "item_id", "itemId", "movieId"),
    ("rating", "value"),
)

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ratings:
    """Ratings of items by users: users and items are int64 from 0, values float64 and finite."""

    users: Integers
    items: Integers
    values: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.values)

    def part(self, which: npt.NDArray[Any]) -> Ratings:
        """Return some of them, by their positions or a mask."""
        return Ratings(self.users[which], self.items[which], self.values[which])


def read_ratings(path: Path) -> Ratings:
    """Read a CSV, TSV or parquet file with columns of users, items and ratings.

    Raises `ConfigurationError` if the file cannot be read, a column is missing, or a value is
    invalid; the message has its place.
    """
    table = read_parquet(path) if path.suffix == ".parquet" else read_csv(path)
    there, chosen = [*table.frame.columns], []
    for names in COLUMNS:
        found = next((name for name in names if name in there), None)
        if found is None:
            raise ConfigurationError(
                f"{path} has no column {' or '.join(names)}; there are: {', '.join(there)}"
            )
        chosen.append(found)
    for name in chosen[:2]:
        keys = numbers(table.frame[name], table.place(name))
        if table.frame[name].dtype.kind not in "iu" or not len(keys) or keys.min() < 0:
            raise ConfigurationError(f"{path}: column {name!r}: expected whole numbers from 0")
    users, items = (table.frame[name].to_numpy(np.int64) for name in chosen[:2])
    return Ratings(users, items, numbers(table.frame[chosen[2]], table.place(chosen[2])))


@dataclass(frozen=True, slots=True)
class RatingSource:
    """A file of ratings, or pixels of scikit-learn's digits; if `large`, of Fashion-MNIST."""

    path: Path | None = None
    large: bool = False
    seed: int = 0

    @property
    def named(self) -> str:
        """Name of the source."""
        if self.path is not None:
            return str(self.path)
        return "Fashion-MNIST" if self.large and fashion() else "digits"


@dataclass(frozen=True, eq=False)
class Prepared:
    """Training ratings and held-out ratings, with the same shift and scale.

    Attributes
    ----------
    learn
        Their mean is 0 and their variance 1.
    held_out
        Only of users and items that are in `learn`.
    scale
        Original size of one unit of the values.
    users, items
        The keys in `learn`, sorted, each once.
    """

    learn: Ratings
    held_out: Ratings
    scale: float
    users: Integers
    items: Integers

    @property
    def error_of_mean(self) -> float:
        """Root mean square error of the mean on held-out ratings, unscaled."""
        return float(self.scale * np.sqrt(np.mean(self.held_out.values**2)))

    def positions(self, ratings: Ratings) -> tuple[Integers, Integers]:
        """Return the index of the user and item of each rating in `users` and `items`."""
        return np.searchsorted(self.users, ratings.users), np.searchsorted(
            self.items, ratings.items
        )

    def share(self, index: int, workers: int) -> Ratings:
        """Return the share of a worker: all ratings of every `workers`-th user."""
        return self.learn.part(np.searchsorted(self.users, self.learn.users) % workers == index)


def prepare(source: RatingSource) -> Prepared:
    """Read and split; the same source gives the same in every process.

    Raises `ConfigurationError` if the file cannot be read or is invalid, or all ratings are equal.
    """
    ratings = read_ratings(source.path) if source.path else _pixels(source)
    out = np.random.default_rng(source.seed).permutation(len(ratings)) % HELD_OUT == 0
    learn, held_out = ratings.part(~out), ratings.part(out)
    users, items = np.unique(learn.users), np.unique(learn.items)
    known = np.isin(held_out.users, users) & np.isin(held_out.items, items)
    mean, scale = learn.values.mean(), learn.values.std()
    if not known.any() or learn.values.min() == learn.values.max():
        raise ConfigurationError(
            f"{source.named}: {len(ratings)} ratings of {len(users)} users and {len(items)} items "
            "are too few, or all the same: there is nothing to learn and to hold out"
        )

    def scaled(some: Ratings) -> Ratings:
        return Ratings(some.users, some.items, (some.values - mean) / scale)

    return Prepared(scaled(learn), scaled(held_out.part(known)), float(scale), users, items)


def _pixels(source: RatingSource) -> Ratings:
    """Return some pixels of each image: image as user, pixel as item, grey value as rating."""
    images = images_of(fashion() if source.large else None)
    flat = images.reshape(len(images), -1)
    rng = np.random.default_rng([source.seed, 1])
    drawn = np.unique(rng.integers(0, flat.size, len(flat) * DRAWN[source.named]))
    users, items = np.divmod(drawn, flat.shape[1])
    return Ratings(users, items, flat[users, items].astype(np.float64))
