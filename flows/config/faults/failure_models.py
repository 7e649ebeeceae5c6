"""How often large systems fail, by published figures: what `every: {like: …}` draws from.

Only summary figures that were published are in here, none of the data that they were computed from;
docs/howto/fault.md says what each source reports, and what is assumed beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dps.core.faults.expansion import Distribution, Process

HOURS_PER_YEAR = 365.25 * 24


@dataclass(frozen=True, slots=True)
class FailureModel:
    """The failures of a whole system.

    Attributes
    ----------
    failures_per_year
        How many there are of the whole system.
    distribution, shape
        Of the gaps between them, as `Process` has them.
    source
        Where that was published.
    """

    failures_per_year: float
    distribution: Distribution
    shape: float
    source: str

    def process(
        self, until: float, hours_per_second: float, failures_per_year: float | None = None
    ) -> Process:
        """Return the process on the time of a trial.

        Parameters
        ----------
        until
            No fault begins later, in seconds of the trial.
        hours_per_second
            How many hours of the system's time one second of the trial stands for.
        failures_per_year
            Those of a system of another size; None: as published.
        """
        hours = HOURS_PER_YEAR / (failures_per_year or self.failures_per_year)
        return Process(hours / hours_per_second, until, self.distribution, self.shape)


FAILURE_MODELS: Mapping[str, FailureModel] = MappingProxyType(
    {
        # 20 to 1,000 failures a year and system, gaps by Weibull with a shape of 0.7 to 0.8.
        "lanl": FailureModel(
            1000.0,
            "weibull",
            0.7,
            "Schroeder and Gibson, A large-scale study of failures in high-performance computing "
            "systems, DSN 2006",
        ),
        # 419 unexpected interruptions within 54 days on 16,384 GPUs; how gaps are spread is not
        # published: the exponential distribution is an assumption.
        "llama3": FailureModel(
            419 / (54 / 365.25),
            "exponential",
            1.0,
            "Llama Team, The Llama 3 herd of models, 2024, section 3.3.4",
        ),
    }
)
