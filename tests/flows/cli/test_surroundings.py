"""Where the command runs: terminals that lack characters, users without a name or a home."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from flows.workloads.fashion_mnist import cache_folder

ENCODINGS = {
    "ASCII": {"PYTHONIOENCODING": "ascii"},
    "Latin-1": {"PYTHONIOENCODING": "latin-1"},
    "locale C": {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
}
NAMES = ("größe → ∞", "“weniger” …")
CONFIG = {
    "experiment": "small",
    "cluster": "virtual",
    "workload": "softmax",
    "dataset": "digits",
    "training": {"updates": 60},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "axes": {"optimizer.learning_rate": {NAMES[0]: 0.1, NAMES[1]: 0.0001}},
}
USER = 12345


def dps(
    here: Path, *words: str, environment: Mapping[str, str], user: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*user, sys.executable, "-m", "flows.cli", *words],
        cwd=here,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("surroundings")
    (here / "small.yaml").write_text(yaml.safe_dump(CONFIG))
    done = dps(here, "run", "small.yaml", environment={**os.environ, **ENCODINGS["locale C"]})
    assert done.returncode == 0, done.stderr
    assert b"gr??e > ?" in done.stdout
    return here


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_an_encoding_lacks_is_written_in_ascii(recorded: Path, encoding: str) -> None:
    out = b""
    for words in (["plan", "small.yaml"], ["results", "small"], ["replicate", "--help"]):
        done = dps(recorded, *words, environment={**os.environ, **ENCODINGS[encoding]})
        assert done.returncode == 0, done.stderr
        out += done.stdout
    told = out.decode("latin-1" if encoding == "Latin-1" else "ascii")
    assert ("größe > ?" if encoding == "Latin-1" else "gr??e > ?") in told
    assert '"weniger" .' in told
    assert " -" in told, "of a difference below 0"


def test_what_is_wrong_is_written_in_ascii(tmp_path: Path) -> None:
    (tmp_path / "größe.yaml").write_text("größe: 1")
    refused = dps(tmp_path, "run", "größe.yaml", environment={**os.environ, **ENCODINGS["ASCII"]})
    assert refused.returncode == 2
    assert b"Traceback" not in refused.stderr
    assert b"gr??e" in refused.stderr


def test_output_may_be_closed(recorded: Path) -> None:
    for words, code in ((("plan", "small.yaml"), 0), (("plan", "nowhere.yaml"), 2)):
        shell = ("bash", "-c", 'exec "$@" >&- 2>&-', "bash")
        done = dps(recorded, *words, environment=os.environ, user=shell)
        assert done.returncode == code


nameless = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root becomes another user"
)


@nameless
def test_a_user_may_have_neither_a_name_nor_a_home(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(CONFIG))
    tmp_path.chmod(0o777)
    unset = ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    rights = "+dac_read_search"  # for an interpreter that lies in the home of root
    numbers = (f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
    user = ("setpriv", *numbers, f"--inh-caps={rights}", f"--ambient-caps={rights}")
    for words in (["doctor"], ["run", "small.yaml"]):
        done = dps(tmp_path, *words, environment=environment, user=user)
        assert done.returncode == 0, done.stderr.decode()
    # The shell is found by the processes above, which this user may not look at.
    environment["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    refused = dps(tmp_path, "--install-completion", "bash", environment=environment, user=user)
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert refused.stderr.startswith(b"dps: Permission denied for ")


def test_without_a_home_the_cache_is_where_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache_folder() == Path("/nonexistent/.cache/dps/fashion-mnist")
