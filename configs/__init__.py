"""Experiments that `dps run NAME` finds by the names of their files.

Those of this folder are in the package; those of its folders (`replicate`, `studies`) only in a
clone.
"""

import re
from importlib.resources import files
from pathlib import Path


def packaged_names() -> list[str]:
    """Return the names of the configurations; in a clone, also those such as `studies/frontier`."""
    root = Path(str(files("flows.configs")))
    return sorted(
        path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")
    )


def question_of(name: str) -> str:
    """Return the question of an experiment: the first sentence of its comment."""
    text = Path(str(files("flows.configs") / f"{name}.yaml")).read_text("utf-8")
    return re.split(r"(?<=[.?]) ", comment_of(text))[0]


def comment_of(configuration: str) -> str:
    """Return the first comment paragraph of a configuration, which describes it."""
    notes = r"(?:#(?: yaml-language-server| changed by --set|\s*$).*\n)*"
    found = re.match(rf"{notes}((?:#[ \t]*\S.*\n)*)", configuration)
    return " ".join(line.lstrip("# ").rstrip() for line in found[1].splitlines()) if found else ""
