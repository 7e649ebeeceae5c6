"""What the documentation shows works: programs run, configurations load, commands are there."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from distributed import Client
from typer.core import TyperGroup
from typer.main import get_command

from dps import LastStateNotSavedWarning, UpdatesLostWarning
from dps.cluster.backends.local import LocalCluster
from flows.cli import app
from flows.config.experiment import load_experiment
from flows.config.faults import read_trace
from tests.docs.pages import (
    NOT_RUN,
    ROOT,
    RUN_ELSEWHERE,
    Fence,
    examples,
    fences,
    scripts,
    shell_lines,
)
from tests.support.packages import THIRD_PARTY
from tests.support.training import PRELOAD, nodes

# What a program prints that shows that it did what its page says.
PRINTED = {
    "first.py": r"largest error: [0-9.]+e-\d+",
    "broken.py": r"killed tcp://.*\n500 updates were pushed, and the counter is 500\n",
    "supervised.py": r"trained, returned \[ 1\. -2\.  3\.\]\n",
}
BASE: dict[str, Any] = {
    "experiment": "base",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"updates": 2000},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "recovery": "chain",
}
# What dps says on a machine that is too busy.
LATE = UpdatesLostWarning, LastStateNotSavedWarning
# What takes long to import is imported once for all nodes.
IMPORTED = ("sklearn.datasets", "torch", "jax")
FORKED = {**os.environ, "DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "forkserver"}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
COMMANDS = list(shell_lines())


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """The client that the pages speak of."""
    with LocalCluster(nodes(replicas=1), [*PRELOAD, *filter(find_spec, IMPORTED)]) as cluster:
        yield cluster.client


def on_page(fence: Fence) -> str:
    return f"{fence.page}, {fence.title}" if fence.title else fence.page


def skip_without_needs(fence: Fence) -> None:
    for package in fence.needs:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make {package}")


@pytest.mark.cluster
@pytest.mark.parametrize("example", examples().values(), ids=on_page)
def test_the_examples_of_a_page_run(client: Client, example: Fence) -> None:
    skip_without_needs(example)
    # On a machine that is too busy to renew leases, a node is given up and updates may be lost,
    # which dps says. An example that was told so need not come out right, and is run again.
    while True:
        with warnings.catch_warnings(record=True) as said:
            for late in LATE:
                warnings.simplefilter("always", late)
            try:
                _run(example, client)
            except AssertionError:
                if not any(w.category in LATE for w in said):
                    raise
            else:
                return


def _run(example: Fence, client: Client) -> None:
    # Functions of `__main__` travel to the nodes by value, as those of a script or a notebook do.
    # A reader has more time than tests have, for as many seeds.
    text = example.text.replace("seed in range(100)", "seed in range(10)")
    exec(compile(text, example.page, "exec"), {"__name__": "__main__", "client": client})


@pytest.mark.cluster
@pytest.mark.parametrize("script", scripts(), ids=on_page)
def test_a_program_runs(tmp_path: Path, script: Fence) -> None:
    path = tmp_path / script.file_name
    path.write_text(script.text)
    run = subprocess.run(
        [sys.executable, path], env=FORKED, cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert re.search(PRINTED[script.file_name], run.stdout)


@pytest.mark.parametrize("page", RUN_ELSEWHERE)
def test_a_page_that_is_run_elsewhere_has_a_test_there(page: str) -> None:
    assert any(fence.page == page for fence in fences("python"))
    assert f'"{Path(page).name}"' in (ROOT / RUN_ELSEWHERE[page]).read_text().replace("docs/", "")


@pytest.mark.parametrize("page", sorted(NOT_RUN))
def test_what_is_not_run_can_be_compiled_and_says_so(page: str) -> None:
    shown = [fence for fence in fences("python") if fence.page == page]
    assert shown
    for fence in shown:
        compile(fence.text, page, "exec")
    assert "was not tried" in (ROOT / page).read_text()


@pytest.mark.parametrize("fence", [f for f in fences("yaml") if not f.is_file], ids=on_page)
def test_a_configuration_loads(tmp_path: Path, acme: Path, fence: Fence) -> None:
    """What is no whole configuration is a part of one."""
    shown = yaml.safe_load(fence.text)
    path = tmp_path / "shown.yaml"
    path.write_text(yaml.safe_dump(shown if "experiment" in shown else {**BASE, **shown}))
    assert next(iter(load_experiment(str(path)).trial_configs()))


def test_entry_points_are_shown_as_the_package_has_them() -> None:
    (shown,) = (tomllib.loads(f.text) for f in fences("toml") if f.page == "docs/howto/extend.md")
    parser = configparser.ConfigParser()
    parser.read(THIRD_PARTY / "acme_dps-1.2.0.dist-info" / "entry_points.txt")
    assert shown["project"]["entry-points"] == {k: dict(parser[k]) for k in parser.sections()}


@pytest.mark.parametrize("fence", fences("csv"), ids=on_page)
def test_a_trace_is_one(tmp_path: Path, fence: Fence) -> None:
    (tmp_path / "trace.csv").write_text(fence.text)
    faults = [{"kind": "trace", "csv": str(tmp_path / "trace.csv")}]
    path = tmp_path / "traced.yaml"
    path.write_text(yaml.safe_dump({**BASE, "faults": faults}))
    assert len(read_trace(tmp_path / "trace.csv")) == len(fence.text.splitlines()) - 1
    assert list(load_experiment(str(path)).trial_configs())


def misspelt(words: list[str]) -> list[str]:
    """The words of a command line that no such command knows; what stands for values is passed."""
    if words[0] == "make":
        return [word for word in words[1:] if "=" not in word and word not in TARGETS]
    command: Any = get_command(app)
    options = {"--help"}
    wrong = []
    for word in words[1:]:
        if isinstance(command, TyperGroup):
            if word not in command.commands and not word.startswith("-"):
                return [word]
            command = command.commands.get(word, command)
            options |= {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        elif word.startswith("-") and word not in options:
            wrong.append(word)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for _, words in COMMANDS], ids=" ".join)
def test_a_command_is_there(words: list[str]) -> None:
    assert misspelt(words) == []
