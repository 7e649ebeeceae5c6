"""The architecture: what each package may import, and that no two modules import each other.

Lines of `ORDER` read from the ground up: a package may import itself, and what stands before it on
the first line that names it. Imports in functions, and those for types alone, count like others.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent

# A group has a recovery, which needs the messages and the interfaces of the protocol.
BASE = (
    "dps.errors dps.core dps.events dps.protocol dps.protocol.messages dps.recovery "
    "dps.protocol.group dps.public"
)
PROTOCOL = f"{BASE} dps.protocol.server dps.protocol.client"
CLUSTER = (
    f"{PROTOCOL} dps.protocol.coordinator "
    "dps.observe dps.cluster dps.cluster.transport dps.cluster.node dps.cluster.scheduler "
    "dps.cluster.backends dps.cluster.driver dps.cluster.supervision"
)
ORDER = [
    BASE,
    f"{BASE} dps.protocol.server",
    f"{BASE} dps.protocol.client",
    f"{BASE} dps.protocol.coordinator",
    "dps.errors dps.core dps.events dps.observe",
    CLUSTER,
    f"{CLUSTER} dps.faults",
    f"{CLUSTER} dps.faults dps.virtual dps.testing",
    f"{CLUSTER} dps.torch_device dps.torch_embedding dps.torch dps.tree dps",
    f"{CLUSTER} dps.torch_device dps.torch_embedding dps.torch dps.tree dps dps.faults "
    "dps.virtual flows flows.readers "
    "flows.workloads flows.records.events flows.records.record flows.metrics flows.config "
    "flows.records flows.statistics flows.monitor flows.report flows.tracking flows.execution "
    "flows.advice flows.cli flows.__main__",
]

# What of others may be imported, besides the standard library; flows may import anything.
LIBRARIES = {
    "dps": set[str](),
    "dps.errors": set[str](),
    "dps.events": set[str](),
    "dps.core": {"numpy"},
    "dps.public": set[str](),
    "dps.protocol": {"lz4", "msgpack", "numpy"},
    "dps.recovery": {"numpy", "fsspec", "msgpack", "safetensors"},
    "dps.cluster": {
        "pandas",  # for types alone
        *("cryptography", "dask", "dask_jobqueue", "distributed", "numpy", "prometheus_client"),
        *("msgpack", "psutil", "tornado"),
    },
    "dps.observe": {"IPython", "mlflow", "pandas", "rich"},
    "dps.faults": {"dask", "distributed", "fsspec", "psutil"},
    "dps.virtual": {"distributed", "fsspec", "greenlet", "numpy"},
    "dps.testing": set[str](),
    "dps.torch": {"numpy", "torch"},
    "dps.torch_device": {"numpy", "torch"},
    "dps.torch_embedding": {"numpy", "torch"},
    "dps.tree": {"numpy"},
}

# What makes objects of bytes by running code that the bytes name.
RUNS_CODE = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for top in ("dps", "flows") for path in (ROOT / top).rglob("*.py")}
SOURCES = {module: path.read_text() for module, path in MODULES.items()}
PACKAGES = sorted({package for line in ORDER for package in line.split()}, key=len, reverse=True)


def package_of(module: str) -> str:
    """The package of `ORDER` that a module belongs to."""
    # Modules right inside `flows` are the ground of the others; `dps` itself is the facade.
    return next(p for p in PACKAGES if module == p or (module.startswith(f"{p}.") and p != "dps"))


@cache
def allowed(package: str) -> frozenset[str]:
    """The packages that one may import of."""
    line = next(line.split() for line in ORDER if package in line.split())
    return frozenset(line[: line.index(package) + 1])


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def imported(source: str) -> tuple[str, ...]:
    """Every module that is imported anywhere in a file, in functions as well."""
    names: list[str] = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(names)


def own(source: str) -> set[str]:
    """The modules of dps and flows that are imported in a file."""
    names = [name for name in imported(source) if name.split(".")[0] in ("dps", "flows")]
    return {name if name in MODULES else name.rpartition(".")[0] or name for name in names}


def wrong_imports(module: str, source: str) -> list[str]:
    """The imports in a file that its place does not allow."""
    here = package_of(module)
    wrong = [name for name in own(source) if package_of(name) not in allowed(here)]
    if (part := ".".join(module.split(".")[:2])) in LIBRARIES or module == "dps":
        known = {*LIBRARIES[part], *sys.stdlib_module_names, "dps", "flows"}
        wrong += [name for name in imported(source) if name.split(".")[0] not in known]
    return sorted(wrong)


def test_imports_go_one_way() -> None:
    wrong = {module: wrong_imports(module, source) for module, source in SOURCES.items()}
    assert {module: names for module, names in wrong.items() if names} == {}


def test_nothing_is_imported_that_only_the_repository_has() -> None:
    for module, source in SOURCES.items():
        tops = {name.split(".")[0] for name in imported(source)}
        assert tops.isdisjoint(("benchmarks", "examples", "tests")), module


class _WithoutTypes(ast.NodeTransformer):
    """Leaves out what is imported for types alone."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def test_no_modules_import_each_other() -> None:
    graph = {}
    for module, source in SOURCES.items():
        run = ast.unparse(_WithoutTypes().visit(ast.parse(source)))
        graph[module] = own(run) - {module}
    TopologicalSorter(graph).prepare()


def test_nothing_that_is_read_back_can_run_code() -> None:
    for module, source in SOURCES.items():
        names = imported(source)
        assert RUNS_CODE.isdisjoint(name.split(".")[0] for name in names), module
        assert "allow_pickle=True" not in source, module
        assert "distributed.protocol.pickle" not in names, module


def test_every_file_of_dps_and_flows_is_installed() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {name_of(path) for path in MODULES.values() if path.name == "__init__.py"}
    assert packages == {name for name in tool["packages"] if not name.startswith("flows.configs")}
    for path in (path for top in ("dps", "flows") for path in (ROOT / top).rglob("*.*")):
        if path.suffix not in (".py", ".pyc"):
            globs = tool["package-data"].get(name_of(path.parent), [])
            assert any(path.match(glob) for glob in globs), f"{path} is not among package-data"
