"""A filter of another maker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dps import Sending


@dataclass(frozen=True)
class Alternate:
    """Send one entry in `every`, another one with each push; the others wait."""

    every: int = 2
    feedback: ClassVar[bool] = True

    def selected(self, gradient: np.ndarray, sending: Sending) -> np.ndarray:
        """Return the mask of those whose turn it is."""
        mask: np.ndarray = np.arange(gradient.size) % self.every == sending.push % self.every
        return mask
