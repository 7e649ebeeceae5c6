"""The architecture: imports inside `dps` go one way, and each module says what it owns."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "dps").rglob("*.py"))
FLOWS = sorted((ROOT / "flows").rglob("*.py"))
LONGEST = 800

# What each part of dps may import of dps. Its facade, `dps/__init__.py`, may import all of it.
EVENTS = {"errors", "events"}
CORE = EVENTS | {"core"}
PROTOCOL = CORE | {"protocol"}
MAY_IMPORT = {
    "": PROTOCOL | {"cluster"},
    "errors": set[str](),
    "events": {"events"},
    "core": CORE,
    "protocol": PROTOCOL,
    "sim": PROTOCOL | {"sim"},
    "cluster": PROTOCOL | {"cluster"},
    "chaos": PROTOCOL | {"cluster", "chaos"},
}
# What of others it may import, besides the standard library.
LIBRARIES = {
    "": set[str](),
    "errors": set[str](),
    "events": set[str](),
    "core": {"numpy"},
    "protocol": {"numpy", "fsspec", "lz4", "safetensors"},
    "sim": {"numpy", "fsspec"},
    "cluster": {
        *("cryptography", "dask", "dask_jobqueue", "distributed", "numpy", "prometheus_client"),
        "psutil",
    },
    "chaos": {"dask", "distributed", "psutil"},
}

# What makes objects of bytes by running code that the bytes name.
RUNS_CODE = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}


def part(path: str) -> str:
    """The part of dps that a file such as "dps/core/shard.py" belongs to; "" for the facade."""
    name = Path(path).parts[1].removesuffix(".py")
    return "" if name == "__init__" else name


def imported(source: str) -> Iterator[str]:
    """Every module that is imported anywhere in a file, in functions as well."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports inside dps are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def wrong_imports(path: str, source: str) -> list[str]:
    """The imports in a file that its place does not allow."""
    here = part(path)
    wrong = []
    for name in imported(source):
        package, *rest = name.split(".")
        if package == "dps":
            allowed = bool(rest) and rest[0] in MAY_IMPORT[here]
        else:
            allowed = package in LIBRARIES[here] or package in sys.stdlib_module_names
        if not allowed:
            wrong.append(name)
    return wrong


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_go_one_way(path: Path) -> None:
    assert wrong_imports(relative(path), path.read_text()) == []


@pytest.mark.parametrize("path", [*MODULES, *FLOWS], ids=relative)
def test_nothing_that_is_read_back_can_run_code(path: Path) -> None:
    source = path.read_text()
    assert RUNS_CODE.isdisjoint(name.split(".")[0] for name in imported(source))
    assert "allow_pickle=True" not in source
    assert "distributed.protocol.pickle" not in set(imported(source))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_opens_with_a_paragraph_about_itself(path: Path) -> None:
    source = path.read_text()
    assert source.startswith('"""')
    paragraph, *_ = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")
    assert len(paragraph.split()) >= 5
    assert paragraph.endswith(".")


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_is_short_enough_to_be_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST


def test_every_part_of_dps_has_its_rules() -> None:
    assert {part(relative(path)) for path in MODULES} == MAY_IMPORT.keys() == LIBRARIES.keys()


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("dps/core/shard.py", "from dps.protocol import wire", ["dps.protocol.wire"]),
        ("dps/core/shard.py", "import asyncio, scipy", ["scipy"]),
        ("dps/core/shard.py", "def f():\n    import fsspec", ["fsspec"]),
        ("dps/events/base.py", "import numpy as np", ["numpy"]),
        ("dps/events/base.py", "from dps.core.blocks import Layout", ["dps.core.blocks.Layout"]),
        (
            "dps/protocol/server/shard_server.py",
            "from dps.sim.world import World",
            ["dps.sim.world.World"],
        ),
        ("dps/protocol/server/shard_server.py", "import distributed", ["distributed"]),
        ("dps/sim/world.py", "from dps.cluster.node.actor import A", ["dps.cluster.actor.A"]),
        ("dps/cluster/node/actor.py", "from dps.chaos.injector import I", ["dps.chaos.injector.I"]),
        ("dps/cluster/node/actor.py", "from dps.sim.loop import run", ["dps.sim.loop.run"]),
        (
            "dps/chaos/injector.py",
            "from flows.execution.trial import run",
            ["flows.execution.trial.run"],
        ),
        ("dps/cluster/driver/parameter_server.py", "import mlflow, yaml", ["mlflow", "yaml"]),
        ("dps/cluster/driver/parameter_server.py", "import pydantic, typer", ["pydantic", "typer"]),
        ("dps/cluster/driver/parameter_server.py", "from dps import SGD", ["dps.SGD"]),
        ("dps/cluster/driver/parameter_server.py", "import dps", ["dps"]),
        ("dps/__init__.py", "import distributed", ["distributed"]),
        ("dps/core/shard.py", "import numpy as np\nfrom dps.core import rules", []),
        ("dps/chaos/injector.py", "import os\nfrom dps.cluster import local", []),
    ],
)
def test_a_wrong_import_would_be_noticed(path: str, source: str, wrong: list[str]) -> None:
    assert wrong_imports(path, source) == wrong
