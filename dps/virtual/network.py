"""The network between virtual nodes: it carries frames as they are, for as long as that takes."""

from __future__ import annotations

from random import Random
from typing import Any

from dps.errors import DpsError, Unreachable
from dps.protocol import wire
from dps.protocol.transport import Endpoint
from dps.sim.network import Network, Weather
from dps.sim.process import Process, here

PORT = 8700
PER_NET = 250


class NodeNetwork(Network):
    """Connects the processes of one virtual cluster. Used from its loop.

    Each process has a host of its own. What a service is given and returns are frames; an error
    that it raises goes back to who asked.
    """

    def __init__(self, random: Random, latency: float) -> None:
        super().__init__(random, Weather((latency, latency)))

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
