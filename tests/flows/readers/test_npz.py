"""Damaged npz files: whoever reads one refuses it in the same words, whatever the damage is."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dps.errors import ConfigurationError
from flows.readers import read_images
from flows.readers.ratings import read_ratings
from flows.readers.tables import read_npz

READERS: dict[str, Callable[[Path], Any]] = {
    "images": read_images,
    "examples": read_npz,
    "ratings": read_ratings,
}
NAMES = ("x", "y", "user", "item", "rating")
DATA = b"0123456789abcdef" * 8


def zipped(member: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in NAMES:
            archive.writestr(f"{name}.npy", member)
    return file.getvalue()


def single(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


# What an archive's table of contents says of each member: the version that is needed, then two
# bytes of flags and two of how it is packed.
ENTRY = b"PK\x01\x02\x14\x03\x14"
ARRAY = single(np.frombuffer(DATA, np.uint8))
DAMAGE = {
    "cut off": zipped(ARRAY)[:-30],
    "a checksum that does not fit": zipped(ARRAY).replace(DATA, DATA[::-1]),
    "a single array": ARRAY,
    "what cannot be unpacked": zipped(b"\xff" * 9).replace(
        ENTRY + bytes(5), ENTRY + b"\0\0\0\x08\0"
    ),
    "members that are no arrays": zipped(b"1 2 3"),
    "a header that ends too soon": zipped(ARRAY.replace(b"}", b" ")),
    "a packing of the future": zipped(ARRAY).replace(ENTRY, ENTRY[:-1] + b"\xff"),
    "pickles": zipped(single(np.array([{}]))),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told(tmp_path: Path, reader: str, damage: str) -> None:
    (tmp_path / "a.npz").write_bytes(DAMAGE[damage])
    with pytest.raises(ConfigurationError, match=r"a\.npz cannot be read as npz: .*numpy\.savez"):
        READERS[reader](tmp_path / "a.npz")
