"""What the checks are made of: `require`, and patches of the shipped code to watch or break it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.simulator.network import Violation


def require(holds: bool, kind: str, otherwise: str) -> None:
    """Raise `Violation` if something does not hold."""
    if not holds:
        raise Violation(kind, otherwise)


@dataclass(frozen=True, slots=True)
class Patch:
    """Something else, `by`, in the place of the `attribute` of `target`."""

    target: Any
    attribute: str
    by: Any


def before(target: Any, attribute: str, told: Callable[..., None]) -> Patch:
    """Have a function called with what a part of the shipped code is called with, just before."""
    right = getattr(target, attribute)

    def tell_and_do(*args: Any, **kwargs: Any) -> Any:
        told(*args, **kwargs)
        return right(*args, **kwargs)

    return Patch(target, attribute, tell_and_do)


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
