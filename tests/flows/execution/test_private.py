"""A real small run is private: its files are the user's alone, and it serves this machine only."""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http.cookiejar import CookieJar
from ipaddress import ip_address
from itertools import chain, product
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit
from urllib.request import HTTPCookieProcessor, Request, build_opener, urlopen

import psutil
import pytest
import yaml
from safetensors import safe_open

from tests.flows.execution.test_run import command
from tests.support.stranger import needs_root, status_for_a_stranger
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# Four nodes besides the scheduler: a server, a replica, a worker and the evaluator.
NODES = 4
CONNECT_SECONDS = 1.0
UI_SECONDS = 90.0
SLOW = {"workers": 1, "updates": 60, "compute_seconds": 0.03}
CHECKPOINTS = {"durability": {"kind": "checkpoint", "every": 10}}


def below(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        yield folder
        yield from folder.rglob("*")


def read_lines(path: Path) -> None:
    for line in path.read_text().splitlines():
        json.loads(line)


def read_arrays(path: Path) -> None:
    with safe_open(path, "numpy") as file:
        assert file.keys()


READERS: dict[str, Callable[[Path], object]] = {
    ".jsonl": read_lines,
    ".json": lambda path: json.loads(path.read_text()),
    ".safetensors": read_arrays,
    ".yaml": lambda path: yaml.safe_load(path.read_text()),
}


def is_pickle(path: Path) -> bool:
    """Whether a file begins as every pickle does that Python has written since 2003."""
    return path.read_bytes()[:2] in {pickle.PROTO + bytes([number]) for number in range(2, 6)}


def serving(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """The addresses at which processes take connections or datagrams."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for each in process.net_connections("inet"):
                waits = each.type == socket.SOCK_DGRAM and not each.raddr
                if each.laddr and (waits or each.status == psutil.CONN_LISTEN):
                    found.add((each.laddr.ip, each.laddr.port))
    return found


def open_to_others(addresses: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(host, port) for host, port in addresses if not ip_address(host).is_loopback]


def reached_from_outside(ports: Iterable[int]) -> list[tuple[str, int]]:
    """Where somebody answers at the addresses by which other machines know this one."""
    found = []
    for place in product(own_addresses(), ports):
        with suppress(OSError), socket.create_connection(place, CONNECT_SECONDS):
            found.append(place)
    return found


def own_addresses() -> list[str]:
    """The addresses of this machine besides loopback; those of a link name their interface."""
    every = chain.from_iterable(psutil.net_if_addrs().values())
    internet = [each.address for each in every if each.family in (socket.AF_INET, socket.AF_INET6)]
    return [each for each in internet if not ip_address(each).is_loopback]


def ended(process: subprocess.Popen[bytes]) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.05)
    return process.returncode is not None


def in_session(session: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session:
                yield process


def family(pid: int) -> list[psutil.Process]:
    """A process, and all that it has started."""
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory in which a small run took place, under a umask that forbids nothing."""
    here = tmp_path_factory.mktemp("here")
    run = command(here, "run", "small.yaml", recovery=CHECKPOINTS)
    with subprocess.Popen(run, cwd=here, stdout=subprocess.DEVNULL, umask=0) as process:
        assert process.wait() == 0
    return here


def test_files_are_the_users_alone_whatever_the_umask(finished: Path) -> None:
    made = list(below(finished / "results", finished / "mlruns"))
    endings = {path.suffix for path in made}
    assert {".jsonl", ".json", ".safetensors", ".html", ".db", ".csv"} <= endings
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in made}
    open_ones = {str(p): oct(m) for p, m in modes.items() if m != (0o700 if p.is_dir() else 0o600)}
    assert open_ones == {}


def test_records_and_checkpoints_are_text_and_arrays(finished: Path) -> None:
    written = [path for path in below(finished / "results") if path.is_file()]
    others = {".html", ".csv", ".svg", ".png", ".log", ".lock", ""}
    assert {path.suffix for path in written} <= {*READERS, *others}
    for path in written:
        READERS.get(path.suffix, Path.read_bytes)(path)
        assert not is_pickle(path), path


def test_a_run_serves_nothing_beyond_loopback(tmp_path: Path) -> None:
    run = command(tmp_path, "run", "small.yaml", recovery="chain", training=SLOW)
    seen: set[tuple[str, int]] = set()
    with subprocess.Popen(
        run, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        while not ended(process):  # its whole life: sockets come and go
            new = serving(in_session(process.pid)) - seen
            assert reached_from_outside(port for _, port in new) == []
            seen |= new
        assert process.returncode == 0
    assert len(seen) > 2 * NODES, "Dask serves tasks and, apart from that, web pages"
    assert open_to_others(seen) == []


@pytest.fixture(scope="module")
def ui(finished: Path) -> Iterator[tuple[psutil.Process, str]]:
    """The UI of that directory, and the address that it has printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command_of_ui = command(finished, "ui", "--port", str(port))
    with subprocess.Popen(
        command_of_ui, cwd=finished, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout
            starting, served = process.stdout.readline(), process.stdout.readline()
            assert "Ctrl-C ends it" in starting
            (address,) = re.findall(r"http://\S+", served)
            eventually(lambda: ("127.0.0.1", port) in serving(family(process.pid)), UI_SECONDS)
            yield psutil.Process(process.pid), address
        finally:
            process.terminate()


def test_the_ui_lets_a_browser_of_this_machine_in_by_the_address_that_it_prints(
    ui: tuple[psutil.Process, str],
) -> None:
    process, address = ui
    assert urlsplit(address).hostname == "127.0.0.1"
    seen = serving(family(process.pid))
    assert open_to_others(seen) == [], "it serves nothing beyond loopback"
    assert reached_from_outside(port for _, port in seen) == []
    origin = f"http://{urlsplit(address).netloc}"
    with pytest.raises(HTTPError, match="401"):
        urlopen(f"{origin}/")
    cookies = CookieJar()
    browser = build_opener(HTTPCookieProcessor(cookies))
    with browser.open(address) as reply:
        assert b"<!doctype html>" in reply.read(100)
        assert "token" not in reply.url
    (cookie,) = cookies
    assert cookie.has_nonstandard_attr("HttpOnly")
    with browser.open(f"{origin}/ajax-api/2.0/mlflow/experiments/search?max_results=9") as reply:
        names = [found["name"] for found in json.load(reply)["experiments"]]
    assert "dps/small" in names
    wrong = Request(f"{origin}/version", headers={"Cookie": f"{cookie.name}=x{cookie.value}"})
    with pytest.raises(HTTPError, match="401"):
        urlopen(wrong)
    # What speaks to it without a browser: MLFLOW_TRACKING_TOKEN.
    bearer = {"Authorization": f"Bearer {cookie.value}"}
    with urlopen(Request(f"{origin}/version", headers=bearer)) as reply:
        assert reply.status == 200


@needs_root
def test_another_user_can_neither_read_nor_write_in_the_ui(
    ui: tuple[psutil.Process, str], tmp_path: Path
) -> None:
    process, address = ui
    origin = f"http://{urlsplit(address).netloc}"
    experiment = {"name": "theirs", "artifact_location": f"file://{tmp_path}"}
    for path in ("/", "/health", "/version", "/?token=", "/?token=guessed"):
        assert status_for_a_stranger(f"{origin}{path}") == 401
    for api in ("api", "ajax-api"):
        create = f"{origin}/{api}/2.0/mlflow/experiments/create"
        assert status_for_a_stranger(create, experiment) == 401
    # Nor does the token show in what everybody may look at.
    (token,) = parse_qs(urlsplit(address).query)["token"]
    for each in family(process.pid):
        assert token not in " ".join(each.cmdline())
    # With it they could.
    create = f"{origin}/api/2.0/mlflow/experiments/create"
    with urlopen(
        Request(
            create,
            json.dumps(experiment).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
        )
    ) as reply:
        assert reply.status == 200
