"""The filter that random schedules are run with: one that withholds, and repeats its indices.

It is written as a user would write a filter. What the counter workload pushes goes through it in
whole updates, so that what is withheld, sent and counted can be told apart exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dps.core.filters.filter import Sending
from dps.protocol.wire import message

WITHHELD = 2  # updates of a worker that travel as one


@message
@dataclass(frozen=True, slots=True)
class Bins:
    """Send the counter and every bin of `width` cells with something in it, each `every` pushes.

    The cells of a worker are one bin, so all of its lists of indices are the same, and no two
    workers have the same ones.
    """

    width: int
    every: int
    feedback: ClassVar[bool] = True

    def selected(self, gradient: np.ndarray, sending: Sending) -> np.ndarray:
        """Return nothing, or the counter and the bins."""
        mask: np.ndarray = np.zeros(gradient.size, bool)
        if sending.push % self.every == 0:
            filled = gradient[1:].reshape(-1, self.width).any(axis=1)
            mask[0] = gradient[0] != 0
            mask[1:] = np.repeat(filled, self.width)
        return mask
