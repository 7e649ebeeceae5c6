"""What every problem takes, and what comes out of it: how near to the reference it came."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dps import Timings

# These workers compute for long, on machines that may have much else to do: late is not lost. What
# has ended is noticed at once all the same.
PATIENT = Timings(lease=20.0)


@dataclass(frozen=True, slots=True)
class Task:
    """What a problem is run with.

    Attributes
    ----------
    data
        A file of the user's; None: the data that is at hand.
    size
        "small" takes seconds, "large" minutes.
    workers, shards
        How many of each.
    recovery
        A preset of `ParameterServer`.
    seed
        Of everything that is drawn.
    output
        The folder for pictures and lists.
    """

    data: Path | None = None
    size: str = "small"
    workers: int = 2
    shards: int = 2
    recovery: str = "none"
    seed: int = 0
    output: Path = Path("results/examples")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was reached, beside what an independent reference reaches; less is better.

    Attributes
    ----------
    measure
        What the numbers are, as "objective".
    reached, reference
        The number of the problem, and of the reference.
    named
        What the reference is.
    tolerance
        How much higher than the reference it may be, as a fraction of it.
    notes
        What else there is to say, one line each.
    files
        What was written.
    """

    measure: str
    reached: float
    reference: float
    named: str
    tolerance: float
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    @property
    def excess(self) -> float:
        """How much higher than the reference, as a fraction of it; below 0: lower."""
        return self.reached / self.reference - 1

    @property
    def met(self) -> bool:
        """Whether the target is met; a number that is no number is not."""
        return self.excess <= self.tolerance
