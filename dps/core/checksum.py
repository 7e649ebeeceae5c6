"""The checksum of a JSON text, as its last key. It detects damage, not forgery."""

from __future__ import annotations

import re
from zlib import crc32

_SEAL = re.compile(rb',"crc":"([0-9a-f]{8})"\}')
_LENGTH = len(b',"crc":"01234567"}')


def sealed(text: str) -> str:
    """Return a JSON object, which has keys and ends with "}", with its CRC-32 as last key."""
    return f'{text[:-1]},"crc":"{crc32(text.encode()):08x}"}}'


def unsealed(data: bytes) -> bytes:
    """Return the bytes of a text without its checksum; raises `ValueError` if that is wrong."""
    found = _SEAL.fullmatch(data, len(data) - _LENGTH) if len(data) > _LENGTH else None
    if found is None:
        raise ValueError("has no checksum: it was not written by dps, or was cut short")
    text = data[: found.start()] + b"}"
    if f"{crc32(text):08x}".encode() != found[1]:
        raise ValueError("does not match its checksum: it was changed after it was written")
    return text
