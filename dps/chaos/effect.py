"""What all disturbances have in common: they begin, they end, and both leave evidence."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Seen(NamedTuple):
    """What was observed from outside, in words, and whether it proves the effect."""

    evidence: str
    effective: bool


class Effect(Protocol):
    """One disturbance of one node. `begin` is called once, then `end` once, perhaps by another
    thread.

    Attributes
    ----------
    proven
        Whether what was seen since `begin` proves the effect, should its process have ended before
        `end` could look.

    Raises
    ------
    LookupError, OSError, DpsError
        It cannot be carried out: there is no such node or process (any more), or no answer.
    """

    proven: bool

    def begin(self) -> Seen:
        """Carry it out, and see what it does."""
        ...

    def end(self) -> Seen:
        """Take it back, and say what it was seen to have done until then."""
        ...
