"""What the readers of examples return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Examples:
    """Some examples of a file.

    Attributes
    ----------
    x
        One row for each: a float64 array, or a `scipy.sparse.csr_array`.
    y
        Their labels or targets: float64, or texts where a reader says that they may be.
    """

    x: Any
    y: npt.NDArray[Any]
