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


def unsealed(data: bytes) -> tuple[bytes, bool]:
    """Return the bytes of a text without its checksum, and whether it had one.

    Raises
    ------
    ValueError
        It has one, and not that of its bytes.
    """
    found = _SEAL.fullmatch(data, len(data) - _LENGTH) if len(data) > _LENGTH else None
    if found is None:
        return data, False
    text = data[: found.start()] + b"}"
    if f"{crc32(text):08x}".encode() != found[1]:
        raise ValueError("does not match its checksum: it was changed after it was written")
    return text, True
