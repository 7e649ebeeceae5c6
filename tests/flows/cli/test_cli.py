"""The `dps` command itself: its start, its exit codes, and its messages."""

from __future__ import annotations

import csv
import html
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from dps import __version__
from dps.events import TrialResumed, TrialStarted
from flows.cli import app, main
from flows.records.record import write_grid
from tests.support.synthetic import missed, toy_events, write_events, write_experiment

CONFIG = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"updates": 100},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "faults": [{"kind": "kill", "target": "server-0", "at_updates": 50}],
}
BOUNDARY_SECONDS = 0.5


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Command:
    """Calls `main` as the console script does, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> Ended:
        self.monkeypatch.setattr(sys, "argv", ["dps", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert isinstance(code, int)
        return Ended(code, *self.capsys.readouterr())


@pytest.fixture
def dps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    handler, umask = signal.getsignal(signal.SIGTERM), os.umask(0o022)
    yield Command(monkeypatch, capsys)
    signal.signal(signal.SIGTERM, handler)
    os.umask(umask)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    return path


def refused(ended: Ended) -> str:
    """Return the message of a command that ended as bad input has to."""
    assert ended.code == 2
    assert ended.out == ""
    assert all(line.startswith("dps: ") for line in ended.err.splitlines())
    assert "Traceback" not in ended.err
    return ended.err


@pytest.mark.slow
def test_help_answers_in_half_a_second() -> None:
    def seconds() -> float:
        """What the command itself takes: time that others have the cores for does not count."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        shown = subprocess.run(
            [sys.executable, "-m", "flows.cli", "--help"],
            check=True,
            capture_output=True,
            text=True,
        )
        assert "doctor" in shown.stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(5)) < BOUNDARY_SECONDS


HEAVY = {
    *("dask", "distributed", "matplotlib", "mlflow", "numpy", "pandas", "pydantic", "scipy"),
    "sklearn",
}


def test_help_imports_nothing_heavy() -> None:
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "flows.cli", "--help"],
        check=True,
        capture_output=True,
        text=True,
    )
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in shown.stderr.splitlines()}
    assert "typer" in imported
    assert imported & HEAVY == set()


def test_version(dps: Command) -> None:
    assert dps("--version") == Ended(0, f"dps {__version__}\n", "")


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command that is registered, and of every group of them."""
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, TyperGroup):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize("words", list(commands(get_command(app))), ids=" ".join)
def test_every_command_has_help(dps: Command, words: tuple[str, ...]) -> None:
    ended = dps(*words, "--help")
    assert (ended.code, ended.err) == (0, "")
    assert f"dps {' '.join(words)} " in ended.out


def test_plan_shows_trials_and_runs_nothing(dps: Command, tmp_path: Path) -> None:
    ended = dps("plan", "demo")
    assert ended.code == 0
    assert "stateless.kill.seed-1" in ended.out
    assert "24 trials, 24 to run. Nodes needed at once, at most: 7" in ended.out
    assert list(tmp_path.iterdir()) == []


def test_plan_warns_of_a_kill_that_never_comes(dps: Command) -> None:
    late = "axes.faults={kill: [{kind: kill, target: server-0, at_updates: 900}]}"
    ended = dps("plan", "demo", "--set", late)
    assert ended.code == 0
    assert "dps: warning: the kill of server-0 at 900 updates never comes" in ended.err


def test_plan_tells_order_and_time(dps: Command) -> None:
    ended = dps("plan", "demo", "--set", "order_seed=5")
    assert (
        "Order: a block for each of the seeds 0, 1, 2, shuffled within (order_seed 5)." in ended.out
    )
    assert "of running, guessed from the settings, for a quiet machine." in ended.out


def test_plan_speaks_of_a_single_trial(dps: Command, config: Path) -> None:
    told = dps("plan", str(config), "--set", "seeds=[0]").out
    assert "1 trial, 1 to run." in told
    assert "Order: one block, of seed 0, shuffled" in told


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_grid_of_a_million_is_refused_at_once(dps: Command, command: str, tmp_path: Path) -> None:
    many = [f"axes.{key}={list(range(1, 101))}" for key in ("training.updates", "server.shards")]
    seeds = f"seeds={list(range(100))}"
    began = time.process_time()
    ended = dps(command, "demo", *(w for s in ("axes={}", *many, seeds) for w in ("--set", s)))
    assert "the grid has 1,000,000 trials; expected 10,000 at most" in refused(ended)
    assert time.process_time() - began < 5
    assert list(tmp_path.iterdir()) == []


def test_a_large_grid_may_be_asked_for(dps: Command) -> None:
    seeds = f"seeds={list(range(501))}"
    large = ["plan", "demo", "--set", "axes.recovery=[none]", "--set", seeds]
    asked = "the grid has 1,002 trials, which may be a mistake: give --yes"
    assert asked in refused(dps(*large))
    assert "1002 trials, 1002 to run." in dps(*large, "--yes").out


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("trainning.updates=5", "unknown key; did you mean 'training'?"),
        ("training.updates=many", "training.updates: expected a whole number, got 'many'"),
        ("recovery=chian", "unknown recovery strategy 'chian'; did you mean 'chain'?"),
        ("optimizer.kind=sdg", "did you mean 'sgd'?"),
        ("dataset.kind=digitz", "did you mean 'digits'?"),
        ("faults.0.target=server-7", "There are: server-0, server-1, worker-0"),
        ("seeds=[]", "expected at least one seed"),
        ("axes={recovery: []}", "axes.recovery: expected a list of values"),
        ("training.updates", "expected key=value"),
        ("training.updates=[", "malformed YAML"),
    ],
)
def test_a_wrong_setting_is_refused(
    dps: Command, config: Path, command: str, setting: str, told: str
) -> None:
    assert told in refused(dps(command, str(config), "--set", setting))
    assert sorted(path.name for path in config.parent.iterdir()) == ["small.yaml"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("experiment: [", "line 1: malformed YAML"),
        ("seeds: [0]\nseeds: [1]\n", "line 2: malformed YAML: the key 'seeds' is given twice"),
        ("", "the file is empty"),
    ],
)
def test_a_malformed_file_is_refused(dps: Command, config: Path, text: str, told: str) -> None:
    config.write_text(text)
    message = refused(dps("run", str(config)))
    assert told in message
    assert str(config) in message


def test_a_missing_file_is_refused(dps: Command) -> None:
    assert "missing.yaml: no such file" in refused(dps("run", "missing.yaml"))
    assert "did you mean 'fashion'?" in refused(dps("plan", "fashio"))


def test_a_folder_is_called_one(dps: Command, tmp_path: Path) -> None:
    assert f"{tmp_path}: a folder, not a file" in refused(dps("plan", str(tmp_path)))


def test_plan_names_the_parts_of_a_replication(dps: Command) -> None:
    message = refused(dps("plan", "replicate/ttf"))
    assert "one by one: replicate/ttf-by-design, " in message
    assert "replicate/ttf-cnn, replicate/ttf-corrected, " in message
    assert "ttf-published" not in message, "nothing but the replication runs an emulation"


def test_an_unwritable_results_folder_is_refused(
    dps: Command, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "results").write_text("a file where the folder should be")
    assert "cannot be written" in refused(dps("run", str(config)))


@pytest.mark.slow
def test_results_in_every_format(dps: Command, tmp_path: Path) -> None:
    write_experiment(tmp_path / "results" / "demo")
    rows = json.loads(dps("results", "demo", "--format", "json").out)
    assert len(rows) == 16
    lines = csv.DictReader(io.StringIO(dps("results", "demo", "--format", "csv").out))
    assert [line["trial"] for line in lines] == [row["trial"] for row in rows]
    table = dps("results", "demo").out
    assert all(row["trial"] in table for row in rows)
    wrong = dps("results", "demo", "--format", "xml")
    assert wrong.code == 2
    assert "Invalid value" in wrong.err
    assert "Value error" not in wrong.err


@pytest.mark.slow
def test_results_name_the_trials_that_failed_before(dps: Command, tmp_path: Path) -> None:
    folder = write_experiment(tmp_path / "results" / "demo") / "chain.kill.seed-0"
    events = toy_events("chain", "kill", 0)
    assert isinstance(events[0], TrialStarted)
    told = {**events[0].settings, "circumstances": {"failed_attempts": 2}}
    write_events(folder, [replace(events[0], settings=told), *events[1:]])
    assert "chain.kill.seed-0: 2 attempts before failed or invalid" in dps("results", "demo").out


def test_results_say_that_time_was_virtual(dps: Command, tmp_path: Path) -> None:
    started, *rest = toy_events("chain", "kill", 0)
    assert isinstance(started, TrialStarted)
    config = {**started.settings["config"], "cluster": {"kind": "virtual", "profile": "laptop"}}
    on_virtual_time = replace(started, settings={**started.settings, "config": config})
    for name, first in (("one", started), ("two", on_virtual_time)):
        write_events(tmp_path / "results" / name / name, [first, *rest])
    assert "virtual" not in dps("results", "one").out
    assert "Time: virtual, with the profile laptop: " in dps("results", "two").out


def test_results_say_why_a_trial_is_left_out(dps: Command, tmp_path: Path) -> None:
    write_events(tmp_path / "results" / "demo" / "one", toy_events("chain", "kill", 0)[:-1])
    shown = " ".join(dps("results", "demo").out.split())
    assert "is failed and left out: its record has no end: it is running" in shown


def test_results_and_report_name_the_command_for_each_trial_that_does_not_count(
    dps: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "results" / "demo"
    toy = {seed: toy_events("none", "no fault", seed) for seed in (0, 1)}
    start, end = toy[0][0].t, toy[0][-1]
    write_events(folder / "none.no-fault.seed-0", [*toy[0][:-1], TrialResumed(start, "c", 5), end])
    write_events(folder / "none.no-fault.seed-1", missed(toy[1]))
    names = [f"none.no-fault.seed-{seed}" for seed in range(3)]
    command = "dps run a.yaml --set seeds=[0,1,2]"
    write_grid(folder, names, 0, command=command)
    shown, page = dps("results", "demo").out, dps("report", "demo")
    text = html.unescape((folder / "report.html").read_text())
    for name, what, option in (
        (names[2], "missing or damaged", ""),
        (names[1], "invalid", " --retry-invalid"),
        (names[0], "resumed, so that figures of the whole training are missing", " --no-resume"),
    ):
        line = f"{name} (1 of 3 trials): {what}; to run it again: {command}{option}"
        assert f"{line}\n" in shown
        assert line in text, page.err


@pytest.mark.slow
def test_a_damaged_record_leaves_out_its_trial_and_no_other(dps: Command, tmp_path: Path) -> None:
    file = write_experiment(tmp_path / "results" / "demo") / "chain.kill.seed-0" / "events.jsonl"
    whole = file.read_text()
    file.write_text(whole.replace('"event":"Evaluated"', '"event":"Unheard"', 1))
    told = "chain.kill.seed-0 is left out, its record is damaged:"
    shown = dps("results", "demo", "--format", "json")
    assert shown.code == 0
    assert len(json.loads(shown.out)) == 15
    assert shown.err.startswith(f"dps: warning: {told}")
    report = dps("report", "demo")
    assert report.code == 0
    assert told in report.err
    assert told in (tmp_path / "results" / "demo" / "report.html").read_text()


@pytest.mark.slow
def test_report_is_written_where_asked(dps: Command, tmp_path: Path) -> None:
    write_experiment(tmp_path / "results" / "demo")
    ended = dps("report", "demo", "--output", "mine.html")
    assert ended.code == 0
    assert "<html" in (tmp_path / "mine.html").read_text()
    ended = dps("report", "demo", "--figures", "single", "--latex", "paper")
    assert "paper/kill-accuracy.tex" in ended.out
    assert (tmp_path / "paper" / "kill-accuracy.tex").exists()
    assert (tmp_path / "results" / "demo" / "report.html").exists()
    figures = tmp_path / "results" / "demo" / "figures"
    assert {path.suffix for path in figures.iterdir()} == {".svg", ".pdf", ".png", ".csv"}
    assert 'width="237.6pt"' in (figures / "timeline-kill-chain.svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["report", "results"])
def test_an_unknown_experiment_is_refused(dps: Command, tmp_path: Path, command: str) -> None:
    assert "nothing is recorded in" in refused(dps(command, "demo"))
    write_experiment(tmp_path / "results" / "demo")
    assert "did you mean 'demo'?" in refused(dps(command, "dmo"))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["report", "results", "compare"])
def test_a_damaged_list_of_trials_is_refused(dps: Command, tmp_path: Path, command: str) -> None:
    folder = write_experiment(tmp_path / "results" / "demo")
    (folder / "grid.json").write_text('{"trials": [')
    names = ["demo", "demo/chain.kill"] if command == "compare" else ["demo"]
    assert f"dps: {folder / 'grid.json'} does not name the trials" in refused(dps(command, *names))


def test_ui_without_a_store_is_refused(dps: Command) -> None:
    assert "there is no tracking store" in refused(dps("ui"))


def test_doctor_ends_by_what_it_finds(dps: Command, tmp_path: Path) -> None:
    good = dps("doctor")
    assert good.code == 0
    assert "dataset digits" in good.out
    (tmp_path / "results").write_text("a file where the folder should be")
    bad = dps("doctor")
    assert bad.code == 1
    assert "!!" in bad.out


@pytest.mark.slow
def test_as_a_process_an_error_is_one_line_and_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flows.cli", "run", "dmo"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("dps: dmo: no such file")
    assert ended.stderr.count("\n") == 1
