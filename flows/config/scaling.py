"""The sections of a configuration that say when servers and workers come and go."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from flows.config.base import Count, Section
from flows.config.errors import refuse


class ChangeSection(Section):
    """Another number of servers, of workers or of both, from a moment of the training on."""

    at_updates: PositiveInt | None = None
    at_seconds: NonNegativeFloat | None = None
    servers: Count | None = None
    workers: Count | None = None

    @model_validator(mode="after")
    def _says_when_and_what(self) -> ChangeSection:
        if (self.at_updates is None) == (self.at_seconds is None):
            refuse("expected one moment: at_updates or at_seconds")
        if self.servers is None and self.workers is None:
            refuse("expected what changes: servers, workers or both")
        return self

    def is_due(self, updates: int, seconds: float) -> bool:
        """Whether its moment has come, so many updates and seconds after the start."""
        if self.at_updates is not None:
            return updates >= self.at_updates
        return self.at_seconds is not None and seconds >= self.at_seconds
