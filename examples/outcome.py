"""The settings and the result of an example."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dps import Timings

# These workers compute for long, on machines that may have much else to do: late is not lost. What
# has ended is noticed at once all the same.
PATIENT = Timings(lease=20.0)


@dataclass(frozen=True, slots=True)
class Task:
    """Settings of an example.

    Attributes
    ----------
    data
        The user's file; None: the default data.
    size
        "small" takes seconds, "large" minutes.
    workers, shards
        Number of each.
    recovery
        A preset of `ParameterServer`.
    seed
        Random seed.
    output
        Folder for pictures and lists.
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
    """The result of an example and of its independent reference; lower is better.

    Attributes
    ----------
    measure
        Name of the measure, such as "objective".
    reached, reference
        Value of the example, and of the reference.
    named
        Name of the reference.
    tolerance
        Largest accepted excess over the reference, as a fraction of it.
    notes
        Further results, one line each.
    files
        Paths of the written files.
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
        """Excess over the reference, as a fraction of it; below 0: lower."""
        return self.reached / self.reference - 1

    @property
    def met(self) -> bool:
        """Whether the target is met; NaN does not meet it."""
        return self.excess <= self.tolerance
