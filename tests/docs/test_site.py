"""The documentation as a site: it builds without a warning, and its price table is the real one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dps.core.names import NODE_ROLES
from flows.prices import load_prices
from tests.docs.pages import ROOT


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


def test_the_site_is_built_without_a_warning(site: Path) -> None:
    assert (site / "index.html").exists()
    assert (
        "dps.cluster.server.ParameterServer"
        in (site / "objects.inv").read_bytes().decode("latin-1")
        or "ParameterServer" in (site / "api/parameter-server.html").read_text()
    )


def test_nothing_on_the_site_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|img|link)[^>]*(?:src|href)="(https?:[^"]+)"', page.read_text()
        )
        assert fetched == [], page


def test_the_price_table_of_the_site_is_that_of_the_package() -> None:
    spec = importlib.util.spec_from_file_location("prices", ROOT / "docs/hooks/prices.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    shown = hook.on_page_markdown((ROOT / "docs/prices.md").read_text())
    prices = load_prices()
    assert hook.MARK not in shown
    for role in NODE_ROLES:
        assert f"| {role} | {prices.node_hour[role]:g} | {prices.spot_hour[role]:g}" in shown
    assert all(source in shown for source in prices.sources.values())
