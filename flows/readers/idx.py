"""The idx format of the MNIST family: reads one file of unsigned bytes, .gz or plain.

The format is four bytes (0, 0, type, number of dimensions), each dimension as a big-endian uint32,
then the values, row-major.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dps.errors import ConfigurationError
from flows.readers.files import opened

Array = npt.NDArray[Any]

UNSIGNED_BYTE = 0x08


def read_idx(path: Path, dimensions: int) -> Array:
    """Return the file's values as a read-only uint8 array.

    Raises
    ------
    ConfigurationError
        The file cannot be read, or is not a complete idx file of unsigned bytes with that many
        dimensions; the message names it and says what was expected.
    """
    with opened(path) as file:
        data = file.read()
    header = 4 + 4 * dimensions
    expected = bytes([0, 0, UNSIGNED_BYTE, dimensions])
    if len(data) < header or data[:4] != expected:
        raise ConfigurationError(
            f"{path} is not the idx file expected: {len(data)} bytes that begin with "
            f"{data[:4].hex(' ')!r}, expected {expected.hex(' ')!r} "
            f"({dimensions} dimensions of unsigned bytes)"
        )
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", dimensions, offset=4))
    if len(data) - header != math.prod(shape):
        raise ConfigurationError(
            f"{path} holds {len(data) - header} values, expected {math.prod(shape)}: its header "
            f"announces {' x '.join(map(str, shape))}; get the file again"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def count_idx(path: Path) -> int:
    """Return the first dimension of an idx file, of which no more than the header is read.

    Raises
    ------
    ConfigurationError
        The file cannot be read.
    """
    with opened(path) as file:
        return int.from_bytes(file.read(8)[4:], "big")
