"""The monitor's process, and the ends of its connections at nodes and coordinators."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from dps.cluster import monitor
from dps.cluster.liveness import MonitorLinks, NodePresence
from dps.protocol.messages import Sighted
from dps.protocol.monitor import Look, Monitor, Sighting
from dps.protocol.transport import Watched
from tests.support.waiting import eventually

SECONDS = 20.0


@pytest.fixture
def name() -> Iterator[str]:
    """The socket of a monitor of the test's own, which is running."""
    socket_name = f"\0dps-test-monitor-{secrets.token_hex(8)}"
    command = monitor.command()
    command[-2] = command[-2].replace("main(socket_name())", f"main({socket_name!r})")
    with subprocess.Popen(command) as process:
        yield socket_name
        assert process.wait(SECONDS) == 0, "it ends with the last process"


@contextmanager
def registered(name: str, may_be_killed: bool = True) -> Iterator[Watched]:
    """Register this process."""
    with connected(name) as sock:
        sock.sendall(
            json.dumps({"host": "127.0.0.1", "may_be_killed": may_be_killed}).encode() + b"\n"
        )
        yield Watched(*json.loads(sock.makefile().readline()))


@contextmanager
def connected(name: str) -> Iterator[socket.socket]:
    sock = socket.socket(socket.AF_UNIX)

    def connects() -> bool:
        try:
            sock.connect(name)
        except ConnectionRefusedError:
            return False
        return True

    eventually(connects, SECONDS)
    with sock:
        yield sock


class Child:
    """A process that registers itself and then sleeps."""

    def __init__(self, name: str) -> None:
        script = (
            "import json, socket, sys, time\n"
            "sock = socket.socket(socket.AF_UNIX)\n"
            "sock.connect('\\0' + sys.argv[1])\n"
            "request = json.dumps({'host': '127.0.0.1', 'may_be_killed': True})\n"
            "sock.sendall(request.encode() + b'\\n')\n"
            "print(sock.recv(4096).decode(), flush=True)\n"
            "time.sleep(1000)\n"
        )
        command = [sys.executable, "-c", script, name[1:]]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.watched = Watched(*json.loads(self.process.stdout.readline()))

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def followed(watched: Watched, act: object = None) -> list[tuple[str, float]]:
    """What a coordinator is told of a process, until it is told that it has ended or 1.5 s."""
    seen: list[tuple[str, float]] = []

    async def told(report: Sighted) -> None:
        seen.extend((s.state, s.seconds) for s in report.sightings if s.number == watched.number)

    async def main() -> None:
        links = MonitorLinks(told, unforeseen)
        links.follow(watched.monitor)
        for _ in range(150):
            await asyncio.sleep(0.01)
            if callable(act) and seen:
                await act(links, seen)
            if seen and seen[-1][0] == "gone":
                break
        await links.close()

    asyncio.run(main())
    return seen


def unforeseen(error: Exception) -> None:
    raise error


def test_nodes_that_register_at_the_same_time_share_one_address_of_the_monitor(name: str) -> None:
    with ExitStack() as stack:
        nodes = [stack.enter_context(connected(name)) for _ in range(8)]
        for sock in nodes:
            sock.sendall(b'{"host": "127.0.0.1", "may_be_killed": true}\n')
        assert len({json.loads(sock.makefile().readline())[0] for sock in nodes}) == 1


def test_a_process_that_runs_stops_and_ends_is_seen_so(name: str) -> None:
    with registered(name), Child(name) as child:
        assert {state for state, _ in followed(child.watched)} == {"running"}
        os.kill(child.process.pid, signal.SIGSTOP)
        stopped = followed(child.watched)
        assert stopped[-1][0] == "stopped"
        assert stopped[-1][1] > 1.0
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()
        assert followed(child.watched)[-1][0] == "gone"


@pytest.mark.parametrize("wanted", [0.3, 30.0])
def test_a_stopped_process_is_killed_on_request_if_it_has_been_stopped_for_long(
    name: str, wanted: float
) -> None:
    async def kill(links: MonitorLinks, seen: list[tuple[str, float]]) -> None:
        if seen[-1][1] > 0.3:
            await links.kill(child.watched, wanted)

    with registered(name), Child(name) as child:
        os.kill(child.process.pid, signal.SIGSTOP)
        states = followed(child.watched, kill)
        assert (states[-1][0] == "gone") == (wanted < 1.0)


def test_a_process_that_runs_again_or_must_not_be_killed_is_not(name: str) -> None:
    async def kill(links: MonitorLinks, seen: list[tuple[str, float]]) -> None:
        await links.kill(child.watched, 0.0)
        await links.kill(mine, 0.0)

    with registered(name, may_be_killed=False) as mine, Child(name) as child:
        assert followed(child.watched, kill)[-1][0] == "running"


def test_who_does_not_know_the_secret_learns_and_does_nothing(name: str) -> None:
    with registered(name), Child(name) as child:
        os.kill(child.process.pid, signal.SIGSTOP)
        host, port, _ = child.watched.monitor.split(" ")
        wrong = Watched(f"{host} {port} {secrets.token_hex(32)}", child.watched.number)
        assert followed(wrong) == []
        with socket.create_connection((host, int(port))) as sock:
            nonce = sock.makefile("rb").readline().rstrip(b"\n")
            forged = monitor.Signed(b"guessed", nonce + b"mine", "coordinator")
            sock.sendall(b"mine\n" + forged.line([child.watched.number, 0.0]))
            sock.settimeout(SECONDS)
            while sock.recv(4096):
                pass  # until it hangs up
        assert followed(child.watched)[-1][0] == "stopped"


def test_a_process_that_is_stopped_and_continued_in_turns_is_slow() -> None:
    watched, looks = Monitor(), iter(range(100))
    number = watched.add(may_be_killed=True)
    for tick in range(20):
        (seen,) = watched.look(tick / 10, lambda _: Look("stopped", progress=next(looks)))
        assert seen.seconds == 0.0
    assert not watched.may_kill(number, 2.0, Look("stopped", progress=99), 0.5)


def test_a_process_hangs_only_after_longer_than_a_slow_disk_takes() -> None:
    watched = Monitor()
    number = watched.add(may_be_killed=True)
    seen = [watched.look(float(now), lambda _: Look("hung", 1)) for now in range(7)]
    assert [each.state for (each,) in seen] == ["running"] * 4 + ["stopped"] * 3
    assert not watched.may_kill(number, 4.5, Look("hung", 1), 1.0)
    assert watched.may_kill(number, 5.0, Look("hung", 1), 1.0)


def test_a_process_that_hangs_in_the_kernel_is_seen_so() -> None:
    """It waits for a child that was made by vfork, and makes no progress for `HUNG_SECONDS`."""
    script = (
        "import ctypes, time\n"
        "libc = ctypes.CDLL(None)\n"
        "if libc.vfork() == 0:\n"
        "    libc.sleep(30)\n"
        "    libc._exit(0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True) as process:
        watched = Monitor()
        watched.add(may_be_killed=True)

        def report() -> Sighting:
            (seen,) = watched.look(time.monotonic(), lambda _: monitor.look_at(process.pid))
            return seen

        try:
            eventually(lambda: report().state == "stopped", SECONDS)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_monitor_is_small() -> None:
    """No numpy, no Dask: it is up in a moment, and takes the memory of a bare interpreter."""
    command = monitor.command()
    listed = "import sys; print(*{name for name in sys.modules} - sys.stdlib_module_names)"
    command[-2] = command[-2].replace("main(socket_name())", listed)
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ours = {name for name in printed.split() if "." not in name or name.startswith("dps")}
    packages = {"dps", "dps.cluster", "dps.protocol"}
    assert ours - {"__main__"} == packages | {"dps.cluster.monitor", "dps.protocol.monitor"}


def test_a_process_starts_also_where_the_monitor_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next attempt is soon."""
    socket_name = f"\0dps-test-monitor-{secrets.token_hex(8)}"
    monkeypatch.setattr("dps.cluster.liveness.socket_name", lambda: socket_name)
    monkeypatch.setattr("dps.cluster.liveness.START_SECONDS", 0.5)

    # Of one that is about to end, another is asked at once; then it is tried again later.
    answers = iter([b"", b"", b'["a monitor", 7]\n'])
    connections: list[object] = []  # Python 3.13 closes a connection that nothing refers to

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.readline()
        answer = next(answers)
        writer.write(answer)
        if not answer:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_unix_server(reply, socket_name)
        presence = NodePresence(SimpleNamespace(address="tcp://127.0.0.1:1"))  # type: ignore[arg-type]
        presence.enter("g")
        async with asyncio.timeout(SECONDS):
            await presence.registered()
            assert presence.watched is None
            await asyncio.to_thread(eventually, lambda: presence.watched is not None, SECONDS)
        presence.exit("g")
        server.close()

    asyncio.run(main())
    assert "no monitor watches the processes on this host" in caplog.text


def test_an_error_of_the_coordinator_is_told_and_the_monitor_heard_on() -> None:
    connections: list[object] = []
    failures: list[Exception] = []
    heard: list[Sighted] = []
    enough = asyncio.Event()

    async def reports(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        mine = secrets.token_hex(16).encode()
        writer.write(mine + b"\n")
        theirs = (await reader.readline()).rstrip(b"\n")
        signed = monitor.Signed(b"secret", mine + theirs, "monitor")
        while not enough.is_set():
            writer.write(signed.line([[1, "running", 0.0]]))
            await asyncio.sleep(0.01)
        writer.close()

    async def told(seen: Sighted) -> None:
        heard.append(seen)
        if len(heard) == 3:
            enough.set()
        raise ValueError("a defect")

    async def main() -> None:
        server = await asyncio.start_server(reports, "127.0.0.1", 0)
        links = MonitorLinks(told, failures.append)
        links.follow(f"127.0.0.1 {server.sockets[0].getsockname()[1]} secret")
        async with asyncio.timeout(SECONDS):
            await enough.wait()
        await links.close()
        server.close()

    asyncio.run(main())
    assert len(connections) == 1
    assert [str(error) for error in failures[:3]] == ["a defect"] * 3
