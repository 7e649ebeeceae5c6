"""Parts of the shipped code that a simulation replaces for a while, to watch or to break them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Patch:
    """Something else, `by`, in the place of the `attribute` of `target`."""

    target: Any
    attribute: str
    by: Any


@contextmanager
def patched(*patches: Patch) -> Iterator[None]:
    """Replace parts of the shipped code, and restore them at the end."""
    shipped = [getattr(patch.target, patch.attribute) for patch in patches]
    for patch in patches:
        setattr(patch.target, patch.attribute, patch.by)
    try:
        yield
    finally:
        for patch, before in zip(patches, shipped, strict=True):
            setattr(patch.target, patch.attribute, before)
