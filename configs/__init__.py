"""The experiments that come with the package; `dps run NAME` finds them here by file name."""

from importlib.resources import files
from pathlib import Path


def packaged_names() -> list[str]:
    """Return the names of the configurations that come with the package."""
    root = Path(str(files("flows.configs")))
    found = root.rglob("*.yaml")
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in found)
