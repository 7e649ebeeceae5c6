"""The MLflow UI as a child process."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from urllib.parse import parse_qsl

import psutil
import pytest

from dps.errors import ConfigurationError, StoreUnavailable
from flows.tracking.server import HOST, child, page, served_page, trials_view, ui_command

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


def test_command_serves_the_store_of_the_directory_on_loopback(tmp_path: Path) -> None:
    (tmp_path / "mlruns").mkdir()
    (tmp_path / "mlruns" / "mlflow.db").touch()
    command, environment = ui_command(tmp_path, None, free_port(), TOKEN)
    assert command[0] == sys.executable
    assert command[command.index("--host") + 1] == "127.0.0.1"
    store = f"sqlite:///{tmp_path.resolve()}/mlruns/mlflow.db"
    assert environment == {"MLFLOW_BACKEND_STORE_URI": store, "MLFLOW_TRACKING_TOKEN": TOKEN}
    assert "--workers" in command


def test_the_password_of_a_store_is_on_no_command_line(tmp_path: Path) -> None:
    store = "postgresql://ann:pa55word@db/mlflow"
    command, environment = ui_command(tmp_path, store, free_port(), TOKEN)
    assert "pa55word" not in " ".join(command)
    assert TOKEN not in " ".join(command)
    assert environment == {"MLFLOW_BACKEND_STORE_URI": store, "MLFLOW_TRACKING_TOKEN": TOKEN}
    with pytest.raises(ConfigurationError, match=r"open http://\*\*\*@tracking.example in a"):
        ui_command(tmp_path, "http://ann:pa55word@tracking.example", free_port(), TOKEN)


def test_what_cannot_be_shown_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no tracking store at"):
        ui_command(tmp_path, None, free_port(), TOKEN)
    with pytest.raises(ConfigurationError, match="in a browser"):
        ui_command(tmp_path, "http://tracking.example", free_port(), TOKEN)


def test_a_damaged_store_is_told_before_it_is_served(tmp_path: Path) -> None:
    (tmp_path / "mlruns").mkdir()
    (tmp_path / "mlruns" / "mlflow.db").write_text("no database at all, but long enough " * 50)
    with pytest.raises(StoreUnavailable, match=r"file is not a database\. Move the file away"):
        ui_command(tmp_path, None, free_port(), TOKEN)


def test_the_page_of_trials_filters_and_sorts_so_that_mlflow_unfolds_them() -> None:
    address = page(trials_view("7"), 5000, TOKEN)
    assert address.startswith(f"http://127.0.0.1:5000/?token={TOKEN}#/experiments/7/runs?")
    query = dict(parse_qsl(address.split("?")[2]))
    assert query["workflowType"] == "machine_learning"
    assert query["searchFilter"] == "tags.dps.kind = 'trial'"
    assert query["orderByKey"] == "tags.`dps.order`"


def test_the_page_of_a_server_has_no_password() -> None:
    address = served_page(trials_view("7"), "https://ann:pa55word@tracking.example:8443/mlflow/")
    assert address.startswith("https://tracking.example:8443/mlflow/#/experiments/7/runs?")


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
