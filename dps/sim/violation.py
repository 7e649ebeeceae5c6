"""The word for a broken promise: what kind it is, and how to see it happen again."""

from __future__ import annotations


class Violation(AssertionError):
    """The protocol broke a promise.

    Attributes
    ----------
    kind
        Which promise, in a word or two: what stays the same while a schedule is shrunk.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def require(holds: bool, kind: str, otherwise: str) -> None:
    """Raise `Violation` if something does not hold."""
    if not holds:
        raise Violation(kind, otherwise)
