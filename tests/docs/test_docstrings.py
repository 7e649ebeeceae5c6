"""The examples of docstrings: they run, and public classes have them."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dps
from dps import faults
from tests.docs.pages import ROOT

EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for top in ("dps", "flows")
    for path in sorted(Path(ROOT, top).rglob("*.py"))
    if "    >>> " in path.read_text()
]
# Protocols and bases, and classes whose objects only dps makes.
WITHOUT = {"UpdateRule", "Penalty", "Schedule", "Selection", "Fault", "Lasting", "Effect"}
WITHOUT |= {"Checked", "Durability", "Failover", "Hit", "Injector", "Session"}


def imported() -> dict[str, Any]:
    """What examples use without an import: numpy, and what is public."""
    names = {name: getattr(dps, name) for name in dps.__all__}
    return {
        "np": np,
        "dps": dps,
        **names,
        **{
            name: getattr(faults, name) for name in (*vars(faults), *faults._LAZY) if name[0] != "_"
        },
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_print_what_they_show(name: str) -> None:
    if name.startswith("dps.torch"):
        pytest.importorskip("torch")
    results = doctest.testmod(import_module(name), extraglobs=imported())
    assert results.attempted
    assert not results.failed


def test_public_classes_have_examples() -> None:
    classes = {name: each for name, each in imported().items() if isinstance(each, type)}
    own = {n: c for n, c in classes.items() if c.__module__.startswith("dps")}
    kinds = {n: c for n, c in own.items() if not issubclass(c, BaseException)}
    assert {n for n, c in kinds.items() if ">>>" not in (c.__doc__ or "")} == WITHOUT
