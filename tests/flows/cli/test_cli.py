"""The `dps` command itself: its start, its exit codes, its messages, and where it runs."""

from __future__ import annotations

import html
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from typer.main import get_command

from dps import __version__
from flows.cli import app, main
from flows.records.events import TrialResumed
from flows.records.record import write_grid
from tests.support import commands
from tests.support.synthetic import missed, toy_events, write_events, write_experiment

CONFIG = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"updates": 100},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "faults": [{"kind": "kill", "target": "server-0", "at_updates": 50}],
}


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


@pytest.mark.parametrize("name", get_command(app).commands)  # type: ignore[attr-defined]
def test_every_command_has_help(dps: Command, name: str) -> None:
    ended = dps(name, "-h")
    assert (ended.code, ended.err) == (0, "")
    assert f"dps {name} " in ended.out


def test_plan_shows_trials_and_runs_nothing(dps: Command, tmp_path: Path) -> None:
    ended = dps("plan", "demo")
    assert ended.code == 0
    assert "stateless.kill.seed-1" in ended.out
    assert "24 trials, 24 to run. Nodes needed at once: at most 7" in ended.out
    assert ", guessed from the settings and the load of this machine." in ended.out
    assert list(tmp_path.iterdir()) == []


def test_plan_warns_of_a_kill_that_never_comes(dps: Command) -> None:
    late = "axes.faults={kill: [{kind: kill, target: server-0, at_updates: 900}]}"
    ended = dps("plan", "demo", "--set", late)
    assert ended.code == 0
    assert "dps: warning: the kill of server-0 at 900 updates never happens" in ended.err


def test_mistakes_are_refused_with_their_place(dps: Command, config: Path) -> None:
    for setting, told in (
        ("trainning.updates=5", "unknown key; did you mean 'training'?"),
        ("faults.0.target=server-7", "There are: server-0, server-1, worker-0"),
        ("training.updates", "expected key=value"),
    ):
        assert told in refused(dps("run", str(config), "--set", setting))
    config.write_text("seeds: [0]\nseeds: [1]\n")
    told = f"{config}, line 2: malformed YAML: the key 'seeds' is given twice"
    assert told in refused(dps("run", str(config)))
    assert sorted(path.name for path in config.parent.iterdir()) == ["small.yaml"]


def test_a_results_folder_that_cannot_be_written_is_refused(dps: Command, config: Path) -> None:
    (config.parent / "results").write_text("a file where the folder should be")
    assert "cannot be written" in refused(dps("run", str(config)))


def test_experiments_are_listed_by_group(dps: Command, tmp_path: Path) -> None:
    write_experiment(tmp_path / "results" / "small")
    ended = dps("list")
    assert ended.code == 0
    lines = ended.out.splitlines()
    starts = ("demo ", "Replic", "replicate/ttf ", "Studies", "studies/frontier ", "small")
    places = [
        next(n for n, line in enumerate(lines) if line.strip().startswith(start))
        for start in starts
    ]
    assert places == sorted(places)


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
        (names[0], "resumed, so figures of the whole training are missing", " --no-resume"),
    ):
        line = f"{name} (1 of 3 trials): {what}; to run it again: {command}{option}"
        assert f"{line}\n" in shown
        assert line in text, page.err


def test_an_error_is_one_line_with_code_2_whatever_the_encoding(tmp_path: Path) -> None:
    (tmp_path / "größe.yaml").write_text("größe: 1")
    ended = commands.dps(tmp_path, "run", "größe.yaml", PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(r"dps: gr\xf6\xdfe.yaml")
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root becomes another user"
)
def test_a_user_may_have_neither_a_name_nor_a_home(tmp_path: Path) -> None:
    small = {**CONFIG, "cluster": "virtual", "faults": []}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small))
    tmp_path.chmod(0o777)
    unset = ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    rights = "+dac_read_search"  # for an interpreter that lies in the home of root
    numbers = ("--reuid=12345", "--regid=12345", "--clear-groups")
    user = ("setpriv", *numbers, f"--inh-caps={rights}", f"--ambient-caps={rights}")
    for words in (["doctor"], ["run", "small.yaml"]):
        command = [*user, *commands.DPS, *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
