"""The checksum of a JSON text: its last key, so that the text stays one that anything can read.

It finds damage, such as a flipped bit, and not forgery: whoever can write the file can write the
checksum.
"""

from __future__ import annotations

import re
from zlib import crc32

_SEAL = re.compile(rb',"crc":"([0-9a-f]{8})"\}')
_LENGTH = len(b',"crc":"01234567"}')


def sealed(text: str) -> str:
    """Return the text of a JSON object with the CRC-32 of its bytes as its last key, `crc`.

    Parameters
    ----------
    text
        An object with at least one key; its last character is the closing brace.
    """
    return f'{text[:-1]},"crc":"{crc32(text.encode()):08x}"}}'


def unsealed(data: bytes) -> bytes:
    """Return the bytes of a text without its checksum.

    Raises
    ------
    ValueError
        It has none, or not that of its bytes.
    """
    found = _SEAL.fullmatch(data, len(data) - _LENGTH) if len(data) > _LENGTH else None
    if found is None:
        raise ValueError("has no checksum: it was not written by dps, or was cut short")
    text = data[: found.start()] + b"}"
    if f"{crc32(text):08x}".encode() != found[1]:
        raise ValueError("does not match its checksum: it was changed after it was written")
    return text
