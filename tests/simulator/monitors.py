"""The monitors of simulated machines: what they know is shipped code, how they see is simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from dps.errors import DpsError
from dps.protocol.messages import Done, Sighted
from dps.protocol.monitor import Look, Monitor, Sighting
from dps.protocol.timings import Timings
from dps.protocol.transport import Endpoint, Transport, Watched
from dps.protocol.wire import message
from dps.virtual.platform import look_at
from tests.simulator.network import Network, Process, SimTransport

KEY = "monitor"
LOOK_SECONDS = 0.05
REPORT_SECONDS = 0.1


@message
@dataclass(frozen=True, slots=True)
class KillStopped:
    """To a monitor: kill a process that has been stopped for `seconds`, and is. Reply: Done."""

    number: int
    seconds: float


class SimMonitor:
    """The monitor of one machine, in a process of its own. Used from one virtual event loop.

    Parameters
    ----------
    kill
        Has a process crash.
    """

    def __init__(
        self,
        machine: str,
        network: Network,
        coordinator: Endpoint,
        timings: Timings,
        kill: Callable[[Process], None],
    ) -> None:
        self.process = network.process(f"monitor of {machine}")
        self.process.machine = machine
        self._transport = SimTransport(network, self.process)
        self._coordinator = coordinator
        self._deadline = timings.call
        self._kill = kill
        self._monitor = Monitor()
        self._processes: dict[int, Process] = {}
        self._gone: dict[int, Sighting] = {}  # until the coordinator has heard of it
        self._loop = asyncio.get_running_loop()
        self.process.services[KEY] = self._carry_out
        self.process.run(self._report_forever())

    def watch(self, process: Process) -> Watched:
        """Watch a process of this machine."""
        number = self._monitor.add(may_be_killed=True)
        self._processes[number] = process
        return Watched(self.process.address, number)

    async def _carry_out(self, request: KillStopped) -> Done:
        process = self._processes.get(request.number)
        now = self._loop.time()
        if process is not None and self._monitor.may_kill(
            request.number, now, _look_at(process), request.seconds
        ):
            self._kill(process)
        return Done()

    async def _report_forever(self) -> None:
        last = -REPORT_SECONDS
        while True:
            for number, process in list(self._processes.items()):
                if not process.alive:
                    del self._processes[number]
                    self._monitor.remove(number)
                    self._gone[number] = Sighting(number, "gone")
            now = self._loop.time()
            seen = self._monitor.look(now, lambda number: _look_at(self._processes[number]))
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


def _look_at(process: Process) -> Look:
    return Look("no", None) if process.busy else look_at(process)
