"""The commands of the benchmarks: with `--json`, the keys that their page names."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.support.deployment import ROOT

PAGE = ROOT / "benchmarks" / "README.md"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(
    "words",
    [("elastic", "--moves=1"), ("measuring", "--rounds=1"), ("sparse", "--rounds=1")],
    ids=lambda words: words[0],
)
def test_the_document_has_the_keys_of_the_page(words: tuple[str, str]) -> None:
    _, _, after = PAGE.read_text("utf-8").partition(f"## {words[0]}\n")
    documented = set(re.findall(r"^- `(\w+)`: ", after.partition("\n##")[0], re.MULTILINE))
    assert documented
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    entries = json.loads(done.stdout)
    assert entries
    assert all(set(entry) == documented for entry in entries)


def test_every_command_is_listed() -> None:
    listed = re.findall(r"^## (\w+)$", PAGE.read_text("utf-8"), re.MULTILINE)
    helped = run("--help").stdout
    assert set(re.findall(r"^│ (\w+) ", helped, re.MULTILINE)) == set(listed)
