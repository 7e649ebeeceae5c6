"""The monitors of simulated machines: what they know is shipped code, how they see is simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from dps.errors import DpsError
from dps.protocol.messages import Sighted
from dps.protocol.monitor import Sighting
from dps.protocol.timings import Timings
from dps.protocol.transport import Endpoint, Transport, Watched
from dps.protocol.wire import message
from dps.virtual.node import VirtualMonitor
from tests.simulator.network import Network, Process, SimTransport

KEY = "monitor"
LOOK_SECONDS = 0.05
REPORT_SECONDS = 0.1


@message
@dataclass(frozen=True, slots=True)
class KillStopped:
    """To a monitor: kill a process that has been stopped for `seconds`, and is."""

    number: int
    seconds: float


class SimMonitor(VirtualMonitor[Process]):
    """The monitor of one machine, in a process of its own, which may `kill` processes."""

    def __init__(
        self,
        machine: str,
        network: Network,
        coordinator: Endpoint,
        timings: Timings,
        kill: Callable[[Process], None],
    ) -> None:
        super().__init__(kill)
        self.process = network.process(f"monitor of {machine}")
        self.process.machine = machine
        self._transport = SimTransport(network, self.process)
        self._coordinator = coordinator
        self._deadline = timings.call
        self._gone: dict[int, Sighting] = {}  # until the coordinator has heard of it
        self.process.services[KEY] = self._carry_out
        self.process.run(self._report_forever())

    def watch(self, process: Process) -> Watched:
        """Watch a process of this machine."""
        return Watched(self.process.address, self.add(process))

    def remove(self, number: int) -> None:
        """Stop watching a process that has ended, and report that."""
        super().remove(number)
        self._gone[number] = Sighting(number, "gone")

    async def _carry_out(self, request: KillStopped) -> None:
        self.kill(request.number, request.seconds)

    async def _report_forever(self) -> None:
        last = -REPORT_SECONDS
        while True:
            seen, now = self.look(), self._loop.time()
            if now - last >= REPORT_SECONDS:
                last = now
                self.process.run(self._report(seen))
            await asyncio.sleep(LOOK_SECONDS)

    async def _report(self, seen: list[Sighting]) -> None:
        gone = list(self._gone.values())
        report = Sighted(self.process.address, (*gone, *seen))
        with suppress(DpsError):
            await self._transport.call(self._coordinator, report, self._deadline)
            for sighting in gone:
                self._gone.pop(sighting.number, None)


class SimMonitors:
    """The coordinator's way to the monitors, which report by themselves."""

    def __init__(self, transport: Transport, timings: Timings) -> None:
        self._transport = transport
        self._deadline = timings.call

    def follow(self, monitor: str) -> None:
        """Do nothing: monitors know the coordinator."""

    async def kill(self, watched: Watched, stopped: float) -> None:
        """Have a stopped process killed."""
        request = KillStopped(watched.number, stopped)
        await self._transport.call(Endpoint(watched.monitor, KEY), request, self._deadline)
