"""The monitor of a host: a small process that sees which processes of dps run, stop and end.

`dps.cluster.liveness` has the other ends of its connections, and states its purpose. The first
node on a host starts it, all nodes there register with it, and it ends with the last. It imports
only the standard library and `dps.protocol.monitor`, so it is small and starts at once. Nodes
connect by a unix socket, where the system identifies both ends. Coordinators connect by TCP, from
any host, and receive its reports. Each line on such a connection is signed with a secret that nodes
pass to their coordinator over Dask's connections.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import signal
import socket
import struct
import sys
import time
from asyncio import StreamReader, StreamWriter
from contextlib import suppress
from pathlib import Path
from typing import Any

from dps.protocol.monitor import Halted, Look, Monitor, Sighting

LOOK_SECONDS = 0.1
REPORT_SECONDS = 0.25
START_SECONDS = 10.0  # until the first process must have registered
LEAVING_SECONDS = 1.0  # between the end of a connection and the end of its process
GONE_SECONDS = 5.0  # how long the end of a process is reported, for late connections
LINE_BYTES = 1 << 16
HALTED: dict[str, Halted] = {"T": "stopped", "D": "hung"}  # by its state in /proc
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def socket_name() -> str:
    """Return the name of the abstract unix socket of the monitor that sees this process."""
    # There is one monitor per user in each process namespace, for example in each container.
    return f"\0dps-monitor-1-{os.getuid()}-{os.stat('/proc/self/ns/pid').st_ino}"


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a unix socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, user, _ = CREDENTIALS.unpack(credentials)
    return pid, user


class Signed:
    """Signed lines of one connection, which only holders of the secret can write, in order."""

    def __init__(self, secret: bytes, nonces: bytes, end: str) -> None:
        self._secret = secret
        self._nonces = nonces  # of both ends: they make lines of other connections invalid
        self._end = end  # "monitor" or "coordinator"
        self._written = self._read = 0

    def line(self, value: Any) -> bytes:
        """Return the line that carries a JSON value."""
        text = json.dumps(value).encode()
        self._written += 1
        return b"%s %s\n" % (self._mac(self._end, self._written, text), text)

    def value(self, line: bytes) -> Any:
        """Return the value of the next line of the other end; `ValueError` if it is not genuine."""
        mac, _, text = line.rstrip(b"\n").partition(b" ")
        self._read += 1
        other = "coordinator" if self._end == "monitor" else "monitor"
        if not hmac.compare_digest(mac, self._mac(other, self._read, text)):
            raise ValueError("a line is not signed with the secret of the monitor")
        return json.loads(text)

    def _mac(self, end: str, number: int, text: bytes) -> bytes:
        signed = b"%s %s %d %s" % (self._nonces, end.encode(), number, text)
        return hmac.digest(self._secret, signed, "sha256").hex().encode()


def look_at(pid: int) -> Look:
    """Look at a process: whether its main thread is stopped, or waits in the kernel."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return Look("no", progress=None)  # it is ending, which its pidfd reports
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    # `progress` counts its context switches, which distinguishes a process that hangs in the kernel
    # from one that works there. A process that is traced, as by a debugger, is not stopped.
    switches = fields.get("voluntary_ctxt_switches"), fields.get("nonvoluntary_ctxt_switches")
    return Look(HALTED.get(fields.get("State", "")[:1], "no"), switches)


class _Member:
    """A process on this host that has connected, and registers."""

    def __init__(self, pid: int, writer: StreamWriter) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.writer = writer
        self.number = 0  # 0 until it has registered
        self.left_at: float | None = None


class MonitorProcess:
    """The monitor's process. Not thread-safe."""

    def __init__(self) -> None:
        self._monitor = Monitor()
        self._members: dict[int, _Member] = {}
        self._coordinators: dict[StreamWriter, Signed] = {}
        self._gone: dict[int, float] = {}
        self._servers: dict[str, asyncio.Server] = {}
        self._starting = asyncio.Lock()  # only one server at a time: members register concurrently
        self._secret = secrets.token_hex(32)
        self._reported = -REPORT_SECONDS
        self._last: list[Sighting] = []

    async def run(self, name: str) -> None:
        """Watch until no process is registered."""
        self._loop = asyncio.get_running_loop()
        await asyncio.start_unix_server(self._serve_member, name, limit=LINE_BYTES)
        ends = time.monotonic() + START_SECONDS
        while self._members or time.monotonic() < ends:
            await asyncio.sleep(LOOK_SECONDS)
            if self._members:
                self._look()
                ends = time.monotonic() + LEAVING_SECONDS

    # -- processes on this host ----------------------------------------------------------------

    async def _serve_member(self, reader: StreamReader, writer: StreamWriter) -> None:
        pid, user = peer_of(writer.get_extra_info("socket"))
        if user != os.getuid():
            writer.close()
            return
        member = _Member(pid, writer)
        try:
            async for line in reader:
                await self._handle(member, json.loads(line))
        except (OSError, ValueError, KeyError, TypeError):
            pass
        finally:
            # The process is about to end, or does not need the monitor any more.
            member.left_at = time.monotonic()
            writer.close()
            if not member.number:
                os.close(member.pidfd)

    async def _handle(self, member: _Member, request: dict[str, Any]) -> None:
        """Handle a request of a process: to register, or to change its registration."""
        if "silent" in request:
            self._monitor.silence(member.number, time.monotonic() + float(request["silent"]))
            return
        may_be_killed = bool(request["may_be_killed"])
        if member.number:
            self._monitor.allow(member.number, may_be_killed)
            return
        host = str(request["host"])
        async with self._starting:
            if host not in self._servers:
                self._servers[host] = await asyncio.start_server(
                    self._serve_coordinator, host, 0, limit=LINE_BYTES
                )
        port = self._servers[host].sockets[0].getsockname()[1]
        number = member.number = self._monitor.add(may_be_killed)
        self._members[number] = member
        self._loop.add_reader(member.pidfd, self._ended, number)
        reply = [f"{host} {port} {self._secret}", number]
        member.writer.write(json.dumps(reply).encode() + b"\n")

    def _ended(self, number: int) -> None:
        self._gone[number] = time.monotonic() + GONE_SECONDS
        self._forget(number)
        self._report(time.monotonic())

    def _forget(self, number: int) -> None:
        member = self._members.pop(number)
        self._monitor.remove(number)
        self._loop.remove_reader(member.pidfd)
        os.close(member.pidfd)
        member.writer.close()

    # -- coordinators ----------------------------------------------------------------------------

    async def _serve_coordinator(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Report to a coordinator, and kill stopped processes at its request."""
        nonce = secrets.token_hex(16).encode()
        writer.write(nonce + b"\n")
        try:
            nonces = nonce + (await reader.readline()).rstrip(b"\n")
            signed = self._coordinators[writer] = Signed(self._secret.encode(), nonces, "monitor")
            self._reported = -REPORT_SECONDS  # so that the next look is reported
            async for line in reader:
                number, seconds = signed.value(line)
                member = self._members.get(number)
                if member is not None and self._monitor.may_kill(
                    number, time.monotonic(), look_at(member.pid), seconds
                ):
                    signal.pidfd_send_signal(member.pidfd, signal.SIGKILL)
        except (OSError, ValueError, TypeError):
            pass
        finally:
            self._coordinators.pop(writer, None)
            writer.close()

    # -- looking -----------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        for number, member in list(self._members.items()):
            if member.left_at is not None and now - member.left_at > LEAVING_SECONDS:
                self._forget(number)
        before = self._last
        self._last = self._monitor.look(now, lambda number: look_at(self._members[number].pid))
        stopped = any(sighting.state == "stopped" for sighting in (*before, *self._last))
        if stopped or now - self._reported >= REPORT_SECONDS:
            self._report(now)

    def _report(self, now: float) -> None:
        self._reported = now
        self._gone = {number: until for number, until in self._gone.items() if until > now}
        seen = [sighting for sighting in self._last if sighting.number in self._members]
        report = [*(Sighting(number, "gone") for number in self._gone), *seen]
        for writer, signed in list(self._coordinators.items()):
            writer.write(signed.line(report))
            if writer.transport.get_write_buffer_size() > LINE_BYTES:
                writer.transport.abort()  # its reader is too slow


def main(name: str) -> None:
    """Run the monitor, unless another one is running by now."""
    with suppress(OSError):  # two nodes have started one at the same time
        asyncio.run(MonitorProcess().run(name))


def command() -> list[str]:
    """Return the command that starts the monitor."""
    start = (
        "import sys; sys.path.append(sys.argv[1]); "
        "from dps.cluster.monitor import main, socket_name; main(socket_name())"
    )
    return [sys.executable, "-I", "-S", "-c", start, str(Path(__file__).parents[2])]
