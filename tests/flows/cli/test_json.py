"""`--json`: one document on stdout, with the keys that docs/json.md names; all else on stderr."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from flows.cli import app
from flows.records.owner import exclusive
from tests.support.commands import dps
from tests.support.deployment import ROOT
from tests.support.synthetic import write_experiment

# Commands without `--json`, each with the reason.
WITHOUT = {
    "ui": "it serves until it is ended, and prints addresses only",
    "export": "it writes files, and prints where they are",
    "schema": "what it prints is JSON already",
    "sync": "what comes of it is in the tracking store; its exit code says whether all is there",
}
PAGE = ROOT / "docs" / "json.md"
SMALL: dict[str, Any] = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"updates": 40},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "cluster": {"kind": "virtual"},
    "axes": {
        "recovery": ["none", "chain"],
        "faults": {
            "no fault": [],
            "kill": [{"kind": "kill", "target": "server-0", "at_updates": 20}],
        },
    },
    "claims": [
        {
            "metric": "updates_lost",
            "strategy": "chain",
            "against": "none",
            "condition": "kill",
            "direction": "less",
            "smallest": 1,
        }
    ],
}


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every command that is no group, by its words."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands(get_command(app)))


def test_each_command_writes_json_or_says_why_not() -> None:
    for words, command in COMMANDS.items():
        offers = any("--json" in parameter.opts for parameter in command.params)
        assert offers != (words in WITHOUT), words


def test_nothing_else_is_on_the_page() -> None:
    documented = set(re.findall("^## dps (.+)$", PAGE.read_text("utf-8"), re.MULTILINE))
    assert documented == set(COMMANDS) - set(WITHOUT)
    assert set(WITHOUT) <= set(COMMANDS)
    assert all(map(keys_of, documented))


def keys_of(words: str) -> set[str]:
    """The keys that the page names of a command's document, or of each entry of a list."""
    _, found, after = PAGE.read_text("utf-8").partition(f"# dps {words}\n")
    assert found, f"docs/json.md has no heading for dps {words}"
    rows = re.findall(r"^\| `([a-z0-9_]+)` \|", after.partition("\n##")[0], re.MULTILINE)
    return set(rows)


class Documents:
    """Runs commands with `--json`, and returns what they write."""

    def __init__(self, here: Path) -> None:
        self.here = here

    def __call__(self, *words: str, code: int = 0) -> Any:
        done = dps(self.here, *words, "--json", MLFLOW_TRACKING_URI="")
        assert done.returncode == code, done.stderr
        document = json.loads(done.stdout)
        each = document if isinstance(document, list) else [document]
        for entry in each:
            assert set(entry) == keys_of(words[0])
        return document


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Documents, Any]:
    """A small experiment on virtual time that was run, and what the run said."""
    here = tmp_path_factory.mktemp("here")
    (here / "small.yaml").write_text(yaml.safe_dump(SMALL, sort_keys=False))
    documents = Documents(here)
    return documents, documents("run", "small.yaml")


@pytest.mark.slow
def test_a_run_says_what_results_say(ran: tuple[Documents, Any]) -> None:
    documents, said = ran
    assert [trial["status"] for trial in said["trials"]] == ["valid"] * 4
    assert Path(said["report"]).is_file()
    found = documents("results", "small")
    assert {key: said[key] for key in ("claims", "comparison")} == {
        key: found[key] for key in ("claims", "comparison")
    }
    [claim] = found["claims"]
    assert (claim["strategy"], claim["verdict"]) == ("chain", "not resolved")
    assert {row["strategy"] for row in found["comparison"]} == {"none", "chain"}


@pytest.mark.slow
def test_plan_and_report_and_compare(ran: tuple[Documents, Any]) -> None:
    documents, _ = ran
    planned = documents("plan", "small.yaml")
    assert [trial["recorded"] for trial in planned["trials"]] == [True] * 4
    assert planned["seconds"] == 0
    assert planned["claims"][0]["claim"]["smallest"] == 1
    assert documents("report", "small")["left_out"] == []
    both = documents("compare", "small/none", "small/chain")
    assert "recovery.durability.kind" in {each["key"] for each in both["settings"]}
    alone = documents("compare", "small/none.kill.seed-0", "small/chain.kill.seed-0")
    assert alone["comparison"] == []
    lost = [run["trials"][0]["updates_lost"] for run in alone["runs"]]
    assert lost[0] > lost[1] == 0


@pytest.mark.slow
def test_a_trial_is_replayed(ran: tuple[Documents, Any]) -> None:
    both = ran[0]("rerun", "small/chain.kill.seed-0")
    assert both["rerun"]["updates_applied"] == both["original"]["updates_applied"]


@pytest.mark.slow
def test_a_run_that_fails_ends_with_1_and_says_so_in_the_document(tmp_path: Path) -> None:
    short = {**SMALL, "axes": {}, "claims": [], "time_limit": 0.001}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(short))
    [trial] = Documents(tmp_path)("run", "small.yaml", code=1)["trials"]
    assert trial["status"] == "failed"


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("advise", ["--model=1MB", "--mtbf=1h", "--workers=2", "--gradient=100ms", "--seeds=4"]),
        ("calibrate", ["--output=mine.yaml"]),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_is_measured_is_written_with_the_keys_of_the_page(
    tmp_path: Path, command: str, words: list[str]
) -> None:
    assert Documents(tmp_path)(command, *words)


def test_the_status_of_what_runs(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path / "results" / "demo")
    with exclusive(folder):
        [found] = Documents(tmp_path)("status")
    assert found["owner"]["pid"] == os.getpid()
    assert {trial["state"] for trial in found["trials"]} == {"valid"}
    assert all(trial["training"] is None for trial in found["trials"])


def test_the_doctor(tmp_path: Path) -> None:
    found = Documents(tmp_path)("doctor")
    assert found["ok"] == all(each["good"] for each in found["findings"])


@pytest.mark.parametrize("words", [["results", "nothing"], ["plan", "demo", "--job-script"]])
def test_bad_input_writes_no_document(tmp_path: Path, words: list[str]) -> None:
    done = dps(tmp_path, *words, "--json")
    assert (done.returncode, done.stdout) == (2, "")


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    code = (
        "import numpy as np; from pathlib import Path\n"
        "from flows.cli.console import json_output\n"
        "with json_output(True) as out:\n"
        "    print('aside'); import os; os.system('echo child')\n"
        "    some = {'a': float('nan'), 'b': np.float32(2), 'c': Path('x'), 'd': np.arange(2)}\n"
        "    out.write(some)\n"
        "print('after')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    document, _, after = done.stdout.rpartition("}")
    assert json.loads(document + "}") == {"a": None, "b": 2, "c": "x", "d": [0, 1]}
    assert after == "\nafter\n"
    assert sorted(done.stderr.split()) == ["aside", "child"]


# -- completion ------------------------------------------------------------------------------------


def completed(here: Path, *words: str) -> list[str]:
    """What bash is offered after these words."""
    asked = {"COMP_WORDS": " ".join(["dps", *words]), "COMP_CWORD": str(len(words))}
    return dps(here, _DPS_COMPLETE="complete_bash", **asked).stdout.split()


def test_the_shell_completes_names(tmp_path: Path) -> None:
    write_experiment(tmp_path / "results" / "mine")
    (tmp_path / "demonstration.yaml").write_text("")
    (tmp_path / "demo.txt").write_text("")
    assert completed(tmp_path, "run", "demo") == ["demo", "demonstration.yaml"]
    assert completed(tmp_path, "results", "") == ["mine"]
    assert "mine/chain.kill" in completed(tmp_path, "compare", "mine/ch")
    assert "mine/chain.kill.seed-0" in completed(tmp_path, "rerun", "mine/chain.kill")
