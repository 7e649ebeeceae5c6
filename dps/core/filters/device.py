"""Where gradients are filtered: on the host, as arrays, or on a device, as tensors of torch.

A chain of filters does the same in both places. It uses the operators that arrays and tensors share
and, for other operations, the methods of a `Device`. `dps.torch_device` has a subclass for tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dps.core.blocks import Empty, all_finite
from dps.core.filters.encoding import (
    Random,
    Section,
    Stretch,
    Values,
    encoded,
    payload_of,
    values_of,
)
from dps.core.filters.filter import Selection, Sending
from dps.core.ranges import described
from dps.errors import ConfigurationError

Numbers = Any  # 1-D: an array, or a tensor
Mask = Any  # booleans, in the same form


class Device:
    """Operations on arrays for a chain of filters, in addition to operators. Thread-safe."""

    def view(self, buffer: Any, stretch: Stretch) -> Numbers:
        """Return the elements of a stretch, without a copy."""
        return stretch.view(buffer)

    def joined(self, parts: Sequence[Numbers]) -> Numbers:
        """Return several parts as one."""
        return np.concatenate(parts)

    def zeros(self, count: int, dtype: str) -> Numbers:
        """Return zeros."""
        return np.zeros(count, dtype)

    def where(self, mask: Mask, numbers: Numbers) -> Numbers:
        """Return the numbers, with 0 where the mask is false."""
        return np.where(mask, numbers, 0)

    def all_finite(self, numbers: Numbers) -> bool:
        """Whether all numbers are finite."""
        return all_finite(numbers)

    def norm(self, numbers: Numbers) -> float:
        """Return the Euclidean norm."""
        with np.errstate(over="ignore"):
            return float(np.linalg.norm(numbers))

    def selected(self, selection: Selection, numbers: Numbers, sending: Sending) -> Mask:
        """Return the mask of a selection, which cannot change the numbers."""
        given = numbers.view()
        given.flags.writeable = False
        mask = selection.selected(given, sending)
        # Integers would choose entries by their indices.
        if isinstance(mask, np.ndarray) and mask.dtype == bool and mask.shape == given.shape:
            return mask
        raise ConfigurationError(
            f"filters[{sending.array!r}]: {type(selection).__name__}.selected returned "
            f"{described(mask)}, expected a mask, bool{list(given.shape)}; nothing of update "
            f"{sending.update} was sent"
        )

    def encoded(self, numbers: Numbers, mask: Mask, form: Values, random: Random) -> Section:
        """Encode the entries under a mask (None: all), as `encoding.encoded` does."""
        return encoded(numbers, mask, form, random)

    def values(self, section: Section, like: Numbers) -> Numbers:
        """Return the values of a section of numbers `like` these, as `encoding.values_of` does."""
        return values_of(section, str(like.dtype), like.size)

    def payload(self, sections: Sequence[Section], empty: Empty) -> np.ndarray:
        """Return the buffers of sections as one, as `encoding.payload_of` does."""
        return payload_of(sections, empty)

    def on_host(self, numbers: Numbers) -> np.ndarray:
        """Return the numbers as an array."""
        return np.asarray(numbers)


HOST = Device()
