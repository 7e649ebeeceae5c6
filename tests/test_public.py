"""What `import dps` gives, and that it takes no time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dps
from dps import public


def test_import_dps_imports_neither_numpy_nor_dask() -> None:
    loads = "import sys, dps; print(*{name.partition('.')[0] for name in sys.modules})"
    printed = subprocess.run(
        [sys.executable, "-c", loads], check=True, capture_output=True, text=True
    ).stdout
    assert {"numpy", "dask", "distributed", "fsspec"}.isdisjoint(printed.split())


@pytest.mark.parametrize("name", ["errors", "events", "faults", "testing", "tree"])
def test_public_modules_are_imported_on_first_use(name: str) -> None:
    assert subprocess.run([sys.executable, "-c", f"import dps; dps.{name}"]).returncode == 0


def test_all_names_are_listed_and_can_be_imported() -> None:
    everything: dict[str, object] = {}
    exec("from dps import *", everything)
    assert set(dps.__all__) <= everything.keys() & set(dir(dps))
    assert everything["SGD"] is public.SGD is dps.SGD
    assert not hasattr(dps, "SDG")
    assert not hasattr(dps, "_explained")


def test_every_name_is_declared_once() -> None:
    declared = Path(dps.__file__).read_text() + Path(public.__file__).read_text()
    for name in dps.__all__:
        assert declared.count(f" import {name} as {name}\n") == 1, name
