"""Profiles of the time costs of virtual nodes, as YAML files.

A profile is identified by its name, if it comes with dps, or by its path. Each cites the sources of
its figures and sets every cost, except that the cost of gradients is optional.
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field, ValidationError, model_validator

from dps.errors import ConfigurationError
from dps.virtual.profile import Profile
from flows.config.document import read_document
from flows.config.errors import complaints, placed, refuse, suggest
from flows.config.sections import Derived, section_of


class ProfileSection(Derived):
    """A profile; `sources` cites the origin of its figures."""

    name: str
    sources: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _leaves_no_cost_out(cls, data: Any) -> Any:
        for name, field in cls.model_fields.items() if isinstance(data, dict) else ():
            if name != "gradient" and name not in data:
                refuse("is missing; add it", key=name)
            for part in getattr(field.annotation, "model_fields", ()):
                if name != "gradient" and isinstance(data[name], dict) and part not in data[name]:
                    refuse("is missing; add it", key=f"{name}.{part}")
        return data

    def build(self) -> Profile:
        """Return the profile."""
        profile: Profile = self.made()
        return profile


PROFILE = section_of(Profile, ProfileSection)
FOLDER = Path(str(files("flows.config.profiles")))


@cache
def shipped() -> tuple[str, ...]:
    """Return the names of the profiles that come with dps."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def load_profile(path_or_name: str) -> ProfileSection:
    """Read a profile of this name that comes with dps, or a YAML file.

    Raises `ConfigurationError` if neither exists, or the file is not a profile.
    """
    if path_or_name in shipped():
        return _read(FOLDER / f"{path_or_name}.yaml", f"profile {path_or_name!r}", 0.0)
    path = Path(path_or_name)
    if not path.is_file():
        raise ConfigurationError(
            f"{path}: no such file, and no profile of this name; {suggest(str(path), shipped())}"
        )
    return _read(path, str(path), path.stat().st_mtime)


@lru_cache(maxsize=8)  # every trial of a grid asks for it several times
def _read(path: Path, name: str, modified: float) -> ProfileSection:
    document = read_document(path, name)
    try:
        return cast("ProfileSection", PROFILE.model_validate(document.data))
    except ValidationError as error:
        raise placed(complaints(error), document) from error
