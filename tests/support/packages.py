"""Packages of other makers: one that is here, and broken ones that a test makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.config import sections

THIRD_PARTY = Path(__file__).parents[1] / "third_party"  # has acme-dps


def package(folder: Path, name: str, entry_points: str, **modules: str) -> Path:
    """Write a package with its entry points and modules into a folder, as an installer does."""
    info = folder / f"{name}-0.3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text(entry_points)
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    return folder


@contextmanager
def installed(folder: Path) -> Iterator[Path]:
    """Have the packages of a folder found, by this process and those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder))
        _forget()
        yield folder
    _forget()


def _forget() -> None:
    sections._registered.cache_clear()
    sections._section_of_package.cache_clear()
