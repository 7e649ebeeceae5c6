"""The network between virtual nodes: it carries frames as they are, for as long as that takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from dps.errors import DpsError, Unreachable
from dps.protocol import wire
from dps.protocol.transport import Endpoint
from dps.sim.network import Network, Weather
from dps.sim.process import Process, here
from dps.virtual.ports import Ports
from dps.virtual.profile import Profile

PORT = 8700
PER_NET = 250
APPLIED = ("train", "replicate")  # links whose requests carry gradients


class NodeNetwork(Network):
    """Connects the processes of one virtual cluster. Used from its loop.

    Each process has a host of its own. What a service is given and returns are frames; an error
    that it raises goes back to who asked.

    Attributes
    ----------
    busy
        For how many seconds each process has been at work on messages, by its address.
    """

    def __init__(self, random: Random, profile: Profile) -> None:
        latency = profile.link.latency
        super().__init__(random, Weather((latency, latency)))
        self._service = profile.service
        self._ports = Ports(self._loop, profile.link.bandwidth, self.nowhere)
        self._free_at: dict[str, float] = {}
        self.busy: dict[str, float] = defaultdict(float)

    def address(self, name: str, number: int) -> str:
        """An address of the form that Dask gives."""
        return f"tcp://10.0.{number // PER_NET}.{number % PER_NET + 1}:{PORT}"

    def note(self, what: str, source: str, target: str, message: str) -> None:
        """Keep no trace: there may be millions of messages."""

    async def request(
        self, source: Process, to: Endpoint, link: str, frames: wire.Frames, deadline: float
    ) -> wire.Frames:
        """Bring frames to a service, and its reply back.

        Raises
        ------
        OSError
            The connection was refused or lost.
        KeyError
            There is no such service in that process.
        """
        if to.address not in self._processes:
            raise ConnectionRefusedError(f"nobody listens at {to.address}")
        try:
            reply: Any = await self.ask(source, to, link, to.key, carried(frames), deadline)
        except Unreachable as error:
            raise ConnectionResetError(str(error)) from None
        if isinstance(reply, BaseException):
            raise reply
        return carried(reply)

    def carry(
        self,
        source: Process,
        target: Process,
        kind: str,
        frames: Any,
        delay: float,
        arrive: Callable[[], None],
        back: bool,
    ) -> None:
        """Have frames leave their host, travel, and wait until the target has time for them."""
        nbytes = 0 if isinstance(frames, BaseException) else wire.size(frames)
        takes = self._service.message + nbytes * self._service.byte
        if kind in APPLIED and not back:
            takes += nbytes * self._service.update
        taken_in = partial(self._take_in, target, takes, arrive)
        ends = source.address, target.address
        self._ports.send(*ends, nbytes, delay, taken_in)

    def _take_in(self, target: Process, takes: float, arrive: Callable[[], None]) -> None:
        """Have a process take in one message after the other."""
        if not takes:
            arrive()
            return
        now = self._loop.time()
        ready = self._free_at[target.address] = (
            max(now, self._free_at.get(target.address, 0.0)) + takes
        )
        self.busy[target.address] += takes
        self._later(ready - now, arrive)

    async def serve(self, target: Process, key: str, link: str, frames: wire.Frames) -> Any:
        """Have a request carried out where it has arrived; return the reply, or an error."""
        service: Any = target.services.get(key)
        if service is None:
            return KeyError(key)
        try:
            return await service(link, frames)
        except (DpsError, OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
            return error

    async def refuses(self, host: str, port: int) -> bool:
        """Whether nobody listens there, as whoever asks finds out."""
        address, source = f"tcp://{host}:{port}", here.get()
        if address not in self._processes or source is None:
            return True
        return await self.probe(source, address)


def carried(frames: wire.Frames) -> wire.Frames:
    """Frames on the wire: nobody's memory but their own, and nobody can change them."""
    copies = [frame.copy() for frame in frames]
    for copy in copies:
        copy.setflags(write=False)
    return copies
