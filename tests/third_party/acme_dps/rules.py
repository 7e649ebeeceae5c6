"""An update rule of another maker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dps.errors import ConfigurationError

Array = np.ndarray


@dataclass(frozen=True)
class SignDescent:
    """Signum: w ← w − η·sign(m), where m is the running mean of the gradients."""

    learning_rate: float
    decay: float = 0.9
    slots: ClassVar[tuple[str, ...]] = ("mean",)

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigurationError(f"SignDescent: decay={self.decay}, expected 0 to below 1")

    def step(
        self,
        values: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        t: int,
        scale: float,
        out: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Return the new values and the new mean."""
        mean = self.decay * slots["mean"] + (1 - self.decay) * gradient
        new = np.subtract(values, self.learning_rate * scale * np.sign(mean), out=out)
        return new, {"mean": mean}
