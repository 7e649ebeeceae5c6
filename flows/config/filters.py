"""The sections of a configuration for filters: what gradients go through on their way."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from dps.core.filters import filter as filters
from dps.core.filters.filter import Filter
from flows.config.base import Built, Section
from flows.config.errors import refusing
from flows.config.plugins import Group, Registered


class SignificantlyModifiedSection(Built[Filter]):
    """Entries that have changed little wait."""

    makes = filters.SignificantlyModified
    kind: Literal["significantly_modified"]
    threshold: NonNegativeFloat
    decay: Literal["1/t"] | None = None


class KktSection(Built[Filter]):
    """Entries that would leave a weight at zero are left out."""

    makes = filters.KKT
    kind: Literal["kkt"]
    strength: PositiveFloat
    delta: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _within_strength(self) -> KktSection:
        with refusing():
            self.build()
        return self


class RandomSkipSection(Built[Filter]):
    """Entries drawn at random wait."""

    makes = filters.RandomSkip
    kind: Literal["random_skip"]
    share: Annotated[float, Field(ge=0, lt=1)]
    seed: NonNegativeInt = 0


class TopKSection(Built[Filter]):
    """All but the largest entries wait."""

    makes = filters.TopK
    kind: Literal["top_k"]
    share: Annotated[float, Field(gt=0, le=1)]


class QuantiseSection(Built[Filter]):
    """Values are written in fewer bits."""

    makes = filters.Quantise
    kind: Literal["quantise"]
    form: Literal["bf16", "int8"]
    seed: NonNegativeInt = 0


class LosslessSection(Built[Filter]):
    """What is left is compressed."""

    makes = filters.Lossless
    kind: Literal["lossless"]


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
