"""The documentation as a site: it builds without a warning, and is complete."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dps
from dps import errors
from dps.core.names import NODE_ROLES
from dps.events import Event
from flows.config.experiment import schema
from flows.metrics import METRICS
from flows.metrics.prices import load_prices
from tests.docs.pages import PAGES, ROOT

_FETCHED = re.compile(r'<(?:script|img|link)[^>]*(?:src|href)="(https?:[^"]+)"')
_DOCUMENTED = re.compile(r"^::: \S+\.(\w+)$", re.MULTILINE)
# An extra as pip is given it: of what, and which.
_EXTRA = re.compile(r"'(dps|\.)\[([\w,]+|\{\w+\})\]'")
UNIONS = {"Consistency", "Filter"}  # types that are just any of what is in the reference


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stderr
    return folder


def hook(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/hooks/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_all_that_a_parameter_server_and_a_worker_do_is_on_the_site(site: Path) -> None:
    reference = (site / "api/parameter-server.html").read_text()
    for owner in (dps.ParameterServer, dps.Worker):
        path = f"{owner.__module__}.{owner.__qualname__}"
        names = [name for name in dir(owner) if not name.startswith("_")]
        missing = {name for name in names if f'id="{path}.{name}"' not in reference}
        assert missing == set()


@pytest.mark.slow
def test_nothing_on_the_site_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert _FETCHED.findall(page.read_text()) == [], page


def test_all_that_can_be_imported_is_in_the_reference() -> None:
    reference = hook("kinds").on_page_markdown
    pages = [reference(page.read_text()) for page in (ROOT / "docs/api").glob("*.md")]
    documented = {name for page in pages for name in _DOCUMENTED.findall(page)}
    refusals = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    public = {*dps.__all__, *Event.kinds, *refusals}
    assert public - documented == UNIONS


def test_the_tables_of_the_site_are_those_of_the_package() -> None:
    tables = hook("tables").on_page_markdown
    shown = tables((ROOT / "docs/prices.md").read_text())
    prices = load_prices()
    for role in NODE_ROLES:
        assert (
            f"| {role} | {prices.node_hour[role].usd:g} | {prices.fixed_hour[role].usd:g} |"
            in shown
        )
    assert str(prices.gb_moved) in shown
    shown = tables((ROOT / "docs/experiments/metrics.md").read_text())
    for metric in METRICS:
        assert f"| `{metric.key}` | " in shown


def sections(node: Any) -> Iterator[dict[str, Any]]:
    """The keys of every section in a JSON schema."""
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from sections(part)
    if isinstance(node, dict) and isinstance(node.get("properties"), dict):
        yield node["properties"]


def test_every_key_of_a_configuration_is_described_in_the_reference() -> None:
    page = (ROOT / "docs/experiments/keys.md").read_text()
    lines = hook("keys").on_page_markdown(page).splitlines()
    for keys in sections(schema()):
        for key, node in keys.items():
            if key == "kind":
                kinds = node.get("enum", [node.get("const")])
                assert all(any(f"`{kind}`" in line for line in lines) for kind in kinds)
            else:
                about = " ".join(node["description"].split()).replace("None", "`null`")
                rows = [line for line in lines if line.startswith(f"| `{key}` | ")]
                assert any(about in row.replace("\\|", "|") for row in rows), key


def test_extras_are_installed_from_a_clone_wherever_it_is_said_how() -> None:
    """No registry has dps, and one may have something else of that name."""
    sources = [path for top in ("dps", "flows") for path in (ROOT / top).rglob("*.py")]
    found = {
        (str(path.relative_to(ROOT)), *said)
        for path in (*PAGES, *sources)
        for said in _EXTRA.findall(path.read_text())
    }
    assert {"README.md", "docs/howto/torch.md"} <= {path for path, _, _ in found}
    assert {entry for entry in found if entry[1] != "."} == set()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {extra for _, _, names in found for extra in names.split(",") if "{" not in extra}
    assert named <= extras.keys()
