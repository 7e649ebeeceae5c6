"""The sections of a configuration for filters: what gradients go through on their way."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from dps.core.filters import filter as filters
from dps.core.filters.filter import Filter
from dps.errors import ConfigurationError
from flows.config.base import Section
from flows.config.errors import refuse
from flows.config.plugins import Group, Registered


class SignificantlyModifiedSection(Section):
    """Entries that have changed little wait."""

    kind: Literal["significantly_modified"]
    threshold: NonNegativeFloat
    decay: Literal["1/t"] | None = None

    def build(self) -> Filter:
        """Return the filter."""
        return filters.SignificantlyModified(self.threshold, self.decay)


class KktSection(Section):
    """Entries that would leave a weight at zero are left out."""

    kind: Literal["kkt"]
    strength: PositiveFloat
    delta: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _within_strength(self) -> KktSection:
        try:
            self.build()
        except ConfigurationError as error:
            refuse(str(error))
        return self

    def build(self) -> Filter:
        """Return the filter."""
        return filters.KKT(self.strength, self.delta)


class RandomSkipSection(Section):
    """Entries drawn at random wait."""

    kind: Literal["random_skip"]
    share: Annotated[float, Field(ge=0, lt=1)]
    seed: NonNegativeInt = 0

    def build(self) -> Filter:
        """Return the filter."""
        return filters.RandomSkip(self.share, self.seed)


class TopKSection(Section):
    """All but the largest entries wait."""

    kind: Literal["top_k"]
    share: Annotated[float, Field(gt=0, le=1)]

    def build(self) -> Filter:
        """Return the filter."""
        return filters.TopK(self.share)


class QuantiseSection(Section):
    """Values are written in fewer bits."""

    kind: Literal["quantise"]
    form: Literal["bf16", "int8"]
    seed: NonNegativeInt = 0

    def build(self) -> Filter:
        """Return the filter."""
        return filters.Quantise(self.form, self.seed)


class LosslessSection(Section):
    """What is left is compressed."""

    kind: Literal["lossless"]

    def build(self) -> Filter:
        """Return the filter."""
        return filters.Lossless()


class _RegisteredFilter(Registered, Section):
    """A selection that an installed package registers."""

    def build(self) -> Filter:
        """Return the filter."""
        selection: Filter = self.made()
        return selection


FILTERS = Group("dps.filters", _RegisteredFilter, needed=("feedback", "selected"), on_wire=True)

FilterSection = Annotated[
    SignificantlyModifiedSection
    | KktSection
    | RandomSkipSection
    | TopKSection
    | QuantiseSection
    | LosslessSection,
    Field(discriminator="kind"),
    FILTERS,
]
