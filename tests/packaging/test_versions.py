"""The versions on the page about compatibility: the oldest, and the newest that were tested."""

from __future__ import annotations

import re
import tomllib
from itertools import chain

from tests.support.deployment import ROOT

ROW = re.compile(r"^\| (\w[\w-]*)[^|]* \| (\d[\d.]*) \| (\d[\d.]*) \|", re.MULTILINE)


def test_the_page_has_the_versions_that_are_required_and_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    required = [f"python{project['requires-python']}", *chain(project["dependencies"], *extras)]
    locks = "\n".join(path.read_text() for path in ROOT.glob("requirements*.lock"))
    locked = dict(re.findall(r"^([\w-]+)==(.*)", locks.lower().replace("_", "-"), re.MULTILINE))
    rows = ROW.findall((ROOT / "docs" / "compatibility.md").read_text())
    assert len(rows) == 12
    for name, oldest, newest in rows:
        assert f"{name.lower()}>={oldest}" in required
        assert f"{locked.get(name.lower(), newest)}.".startswith(f"{newest}.")
