"""What the coordinator hears of monitors: its own errors are no errors of the connection."""

from __future__ import annotations

import asyncio
import secrets

from dps.cluster.monitor import Signed
from dps.cluster.scheduler.monitors import MonitorLinks
from dps.protocol.messages import Sighted

SECONDS = 20.0


def test_an_error_of_the_coordinator_is_told_and_the_monitor_heard_on() -> None:
    connections: list[object] = []
    failures: list[Exception] = []
    heard: list[Sighted] = []
    enough = asyncio.Event()

    async def monitor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        mine = secrets.token_hex(16).encode()
        writer.write(mine + b"\n")
        theirs = (await reader.readline()).rstrip(b"\n")
        signed = Signed(b"secret", mine + theirs, "monitor")
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
        server = await asyncio.start_server(monitor, "127.0.0.1", 0)
        links = MonitorLinks(told, failures.append)
        links.follow(f"127.0.0.1 {server.sockets[0].getsockname()[1]} secret")
        async with asyncio.timeout(SECONDS):
            await enough.wait()
        await links.close()
        server.close()

    asyncio.run(main())
    assert len(connections) == 1
    assert [str(error) for error in failures[:3]] == ["a defect"] * 3
