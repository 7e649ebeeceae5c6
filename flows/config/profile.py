"""Profiles of what costs time on virtual nodes, as they are written in YAML.

A profile is known by its name, if it is one of those that come with dps, or by its path. Each says
where its figures come from.
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, ValidationError

from dps.errors import ConfigurationError
from dps.virtual.profile import Disk, Gradient, Link, Profile, Service
from flows.config.base import SafeName, Section
from flows.config.errors import complaints, placed, suggest
from flows.config.yaml_document import parse_document, read_file
from flows.quoting import shown


class GradientSection(Section):
    """What the computing of a gradient takes (see `dps.virtual.profile.Gradient`)."""

    seconds: NonNegativeFloat = 0.0
    spread: NonNegativeFloat = 0.0
    straggling: Annotated[float, Field(ge=0, le=1)] = 0.0
    factor: Annotated[float, Field(ge=1)] = 1.0


class LinkSection(Section):
    """Seconds of a message between hosts, and bytes a second of a host's port."""

    latency: PositiveFloat
    bandwidth: PositiveFloat


class ServiceSection(Section):
    """Seconds that a process takes for a message, each byte of it, and each of an update."""

    message: NonNegativeFloat
    byte: NonNegativeFloat
    update: NonNegativeFloat


class DiskSection(Section):
    """Seconds of each piece of work with files, and bytes a second."""

    latency: NonNegativeFloat
    bandwidth: PositiveFloat


class ProfileSection(Section):
    """A profile; `sources` says where the figures come from."""

    name: SafeName
    sources: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    gradient: GradientSection = GradientSection()
    link: LinkSection
    service: ServiceSection
    disk: DiskSection
    work: NonNegativeFloat
    start: NonNegativeFloat
    actor: NonNegativeFloat
    detection: NonNegativeFloat

    def build(self) -> Profile:
        """Return the profile."""
        return Profile(
            self.name,
            Link(**self.link.model_dump()),
            Service(**self.service.model_dump()),
            Disk(**self.disk.model_dump()),
            Gradient(**self.gradient.model_dump()),
            self.work,
            self.start,
            self.actor,
            self.detection,
        )


@cache
def shipped() -> tuple[str, ...]:
    """Return the names of the profiles that come with dps."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def load_profile(path_or_name: str) -> ProfileSection:
    """Read a profile of this name that comes with dps, or a YAML file.

    Raises
    ------
    ConfigurationError
        There is neither, or it is no profile.
    """
    if path_or_name in shipped():
        path, name = _folder() / f"{path_or_name}.yaml", f"profile {path_or_name!r}"
    else:
        path, name = Path(path_or_name), path_or_name
        if not path.is_file():
            raise ConfigurationError(
                f"{shown(path_or_name, 200)}: no such file, and no profile of this name; "
                f"{suggest(path_or_name, shipped())}"
            )
    return _section(read_file(path, name), name)


@lru_cache(maxsize=8)  # every trial of a grid asks for it several times
def _section(written: bytes, name: str) -> ProfileSection:
    document = parse_document(written, name)
    try:
        return ProfileSection.model_validate(document.data)
    except ValidationError as error:
        raise placed(complaints(error, document.data), document) from error


def _folder() -> Path:
    return Path(str(files("flows.config.profiles")))
