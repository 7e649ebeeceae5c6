"""The MLflow UI as a child process."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import psutil
import pytest

from dps.errors import ConfigurationError
from flows.tracking.ui_server import HOST, child, ui_command

TOKEN = "what-nobody-guesses"

# A process with a child of its own, which reports its child's pid to the port that it is given.
FAMILY = """
import socket, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.sendall(str(grandchild.pid).encode())
time.sleep(600)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def test_the_password_of_a_store_is_on_no_command_line(tmp_path: Path) -> None:
    store = "postgresql://ann:pa55word@db/mlflow"
    command, environment = ui_command(tmp_path, store, free_port(), TOKEN)
    assert "pa55word" not in " ".join(command)
    assert TOKEN not in " ".join(command)
    assert set(environment.values()) == {store, TOKEN}
    with pytest.raises(ConfigurationError, match=r"open http://\*\*\*@tracking.example in a"):
        ui_command(tmp_path, "http://ann:pa55word@tracking.example", free_port(), TOKEN)


def test_what_cannot_be_shown_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no tracking store at"):
        ui_command(tmp_path, None, free_port(), TOKEN)
    with pytest.raises(ConfigurationError, match="in a browser"):
        ui_command(tmp_path, "http://tracking.example", free_port(), TOKEN)


def test_a_taken_port_is_told(tmp_path: Path) -> None:
    (tmp_path / "store.db").touch()
    store = f"sqlite:///{tmp_path}/store.db"
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match="name another one with --port"):
            ui_command(tmp_path, store, taken.getsockname()[1], TOKEN)
    with pytest.raises(ConfigurationError, match="port 70000"):
        ui_command(tmp_path, store, 70000, TOKEN)


@pytest.mark.slow
def test_child_and_its_children_end_with_the_block() -> None:
    with socket.create_server((HOST, 0)) as server:
        command = [sys.executable, "-c", FAMILY, str(server.getsockname()[1])]
        with child(command) as process:
            connection, _ = server.accept()
            with connection:
                grandchild = psutil.Process(int(connection.makefile().read()))
    assert process.poll() is not None
    _, alive = psutil.wait_procs([grandchild], timeout=5)
    assert alive == []
