"""Which way messages take to a peer, why, and what happens when that way does not work."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import numpy as np
import pytest
from distributed.core import ConnectionPool, Server

from dps.cluster.transport import memory
from dps.cluster.transport import port as module
from dps.cluster.transport.calls import ClusterTransport, Links, Meter
from dps.cluster.transport.port import HANDLER, Port
from dps.errors import DeadlineExceeded, Unreachable
from dps.protocol import wire
from dps.protocol.messages import Weights
from dps.protocol.transport import Endpoint, TransportChoice
from tests.support.leftovers import nothing_left

SECONDS = 20.0
LARGE = 1 << 18


class Peer:
    """A process that can be called, in this one: a Dask server with a port and an echo."""

    def __init__(self, server: Server, port: Port) -> None:
        self.server = server
        self.port = port

    @property
    def address(self) -> str:
        return str(self.server.address)


class Caller:
    """Who calls it, and what was chosen for that."""

    def __init__(self, port: Port, pool: ConnectionPool, wanted: TransportChoice) -> None:
        self.port, self.meter, self.links = port, Meter(), Links()
        self.told: list[tuple[str, str]] = []
        self.transport = ClusterTransport(
            pool,
            self.meter,
            self.links,
            port,
            wanted,
            lambda _, by, why: self.told.append((by, why)),
        )

    async def echo(self, peer: Peer, size: int = 1, deadline: float = SECONDS) -> None:
        values = np.random.default_rng(size).standard_normal(size)
        to = Endpoint(peer.address, "echo")
        back = await self.transport.call(to, Weights(1, 0.0, 0, values), deadline, "train")
        assert (back.values == values).all()


async def echo(link: str, *frames: np.ndarray) -> wire.Frames:
    return list(frames)


class Places:
    """Makes peers and callers, and ends them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def peer(self, listen: str = "tcp://127.0.0.1", offers: bool = True) -> Peer:
        pool = await self._stack.enter_async_context(ConnectionPool())
        server = await self._stack.enter_async_context(Server({}))
        await server.listen(listen)
        port = Port(pool, lambda: str(server.address))
        if offers:
            server.handlers[HANDLER] = port.offer

        async def actor_execute(actor: str, function: str, args: list[object]) -> object:
            from distributed.protocol import to_serialize

            return {"status": "OK", "result": to_serialize(args[1:])}

        server.handlers["actor_execute"] = actor_execute
        port.handlers["echo"] = echo
        port.enter()
        self._stack.callback(port.exit)
        return Peer(server, port)

    async def caller(self, wanted: TransportChoice = "auto") -> Caller:
        pool = await self._stack.enter_async_context(ConnectionPool())
        port = Port(pool)
        port.enter()
        self._stack.callback(port.exit)
        return Caller(port, pool, wanted)


Scenario = Callable[[Places], Awaitable[None]]


def carry_out(scenario: Scenario) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            await scenario(Places(stack))

    with nothing_left():
        asyncio.run(main())


async def silent(kind: module.Kind) -> object:
    """Answer no question of another process before it gives up."""
    await asyncio.Event().wait()
    return None


def late(asked: asyncio.Event, go: asyncio.Event) -> Callable[..., Awaitable[wire.Frames]]:
    """Return a service that sets `asked`, and echoes its argument once `go` is set."""

    async def reply(link: str, *frames: np.ndarray) -> wire.Frames:
        asked.set()
        await go.wait()
        return list(frames)

    return reply


@pytest.mark.parametrize(
    ("wanted", "by", "why"),
    [
        ("auto", "shared_memory", "on the same host"),
        ("shared_memory", "shared_memory", "on the same host"),
        ("stream", "stream", "as chosen"),
        ("dask", "dask", "as chosen"),
    ],
)
def test_what_is_chosen_is_used_and_told_once(wanted: TransportChoice, by: str, why: str) -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller(wanted)
        for size in (1, LARGE, 1):
            await caller.echo(peer, size)
        assert caller.told == [(by, why)]

    carry_out(scenario)


@pytest.mark.parametrize(
    ("difference", "why"),
    [
        ({"host": "another"}, "another host"),
        ({"user": "12345"}, "another user"),
        ({"network namespace": "another"}, "another network namespace"),
    ],
)
def test_processes_that_cannot_share_memory_send_streams(
    difference: dict[str, str], why: str
) -> None:
    async def scenario(places: Places) -> None:
        peer = await places.peer()
        for wanted, by in (("auto", "stream"), ("shared_memory", "dask")):
            caller = await places.caller(wanted)  # type: ignore[arg-type]
            caller.port._place = caller.port._here() | difference
            await caller.echo(peer, LARGE)
            assert caller.told == [(by, why)]

    carry_out(scenario)


def test_a_peer_that_offers_nothing_is_called_by_dask() -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(offers=False), await places.caller()
        await caller.echo(peer, LARGE)
        assert [by for by, _ in caller.told] == ["dask"]

    carry_out(scenario)


def test_what_did_not_work_is_tried_again_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.05)

    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller()
        offer = peer.server.handlers.pop(HANDLER)
        await caller.echo(peer)

        async def only_streams(kind: module.Kind) -> object:
            return await offer(kind) if kind == "stream" else None

        for handler in (only_streams, offer):
            peer.server.handlers[HANDLER] = handler
            before = len(caller.told)
            async with asyncio.timeout(SECONDS):
                while len(caller.told) == before:
                    await caller.echo(peer, LARGE)
        assert [by for by, _ in caller.told] == ["dask", "stream", "shared_memory"]
        kept = [way.connection for way in caller.port._ways.values()]
        assert caller.port._connections.keys() == set(kept) - {None}  # the stream is ended

    carry_out(scenario)


def test_a_peer_that_closes_and_opens_again_is_reached_again() -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller()
        for _ in range(3):
            await caller.echo(peer, LARGE)
            peer.port.exit()
            peer.port.enter()
            peer.port.handlers["echo"] = echo
            await asyncio.sleep(0)
            async with asyncio.timeout(SECONDS):
                while True:
                    try:
                        await caller.echo(peer)
                    except Unreachable:  # it has just been closed
                        continue
                    break
        assert {by for by, _ in caller.told} == {"shared_memory"}

    carry_out(scenario)


@pytest.mark.parametrize("wanted", ["shared_memory", "stream"])
def test_nothing_is_kept_for_a_peer_that_is_gone(wanted: TransportChoice) -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller(wanted)
        await caller.echo(peer, LARGE)
        await caller.echo(peer)
        assert caller.port._ways
        peer.port.exit()
        async with asyncio.timeout(SECONDS):
            while caller.port._connections:
                await asyncio.sleep(0.01)
        assert not caller.port._ways
        peer.port.enter()

    carry_out(scenario)


@pytest.mark.parametrize("wanted", ["auto", "stream"])
def test_a_peer_that_does_not_say_how_it_is_reached_is_called_by_dask(
    wanted: TransportChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_SECONDS", 0.1)

    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller(wanted)

        peer.server.handlers[HANDLER] = silent
        await caller.echo(peer, LARGE, deadline=SECONDS / 2)
        assert [by for by, _ in caller.told] == ["dask"]
        assert "in 0.1 s" in caller.told[0][1]

    carry_out(scenario)


@pytest.mark.parametrize(
    ("wanted", "ways"),
    [("auto", ["shared_memory", "stream", "dask"]), ("stream", ["stream", "dask"])],
)
def test_what_is_sent_again_leaves_a_connection_over_which_nothing_comes(
    wanted: TransportChoice, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_SECONDS", 0.5)

    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller(wanted)
        loop = asyncio.get_running_loop()
        await caller.echo(peer, LARGE)
        for by in ways[:-1]:
            assert caller.told[-1][0] == by
            for connection in peer.port._connections:  # as if the network dropped all packets
                loop.remove_reader(connection._fd)
            async with asyncio.timeout(SECONDS):
                while caller.told[-1][0] == by:
                    with contextlib.suppress(DeadlineExceeded, Unreachable):
                        await caller.echo(peer, LARGE, deadline=0.1)
        await caller.echo(peer, LARGE)
        assert [by for by, _ in caller.told] == ways
        assert "no message arrived by stream" in caller.told[-1][1]

    carry_out(scenario)


def test_a_connection_is_kept_when_the_reply_alone_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server may hold a request for long; and a peer that is paused answers by no connection."""
    monkeypatch.setattr(module, "ASK_SECONDS", 0.2)

    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller()
        asked, go = asyncio.Event(), asyncio.Event()
        for handler in (peer.port.offer, silent):
            peer.port.handlers["echo"] = late(asked, go)
            await caller.port.way(peer.address, "auto", False)
            kept = set(caller.port._connections)
            peer.server.handlers[HANDLER] = handler
            with pytest.raises(DeadlineExceeded):
                await caller.echo(peer, deadline=0.05)
            while caller.port._tested:
                await asyncio.sleep(0.01)
            go.set()
            await caller.echo(peer)
            assert caller.port._connections.keys() == kept
            go.clear()

    carry_out(scenario)


@pytest.mark.parametrize("in_use", ["stream", "shared_memory"])
def test_a_connection_in_use_outlives_a_look_for_a_better_one(
    in_use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the peer is too busy to be asked, or another transport is found."""
    monkeypatch.setattr(module, "ASK_SECONDS", 0.1)
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.0)  # each call looks again

    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller()
        asked, go = asyncio.Event(), asyncio.Event()
        peer.port._place = module._Impassable("no memory here")
        peer.port.handlers["echo"] = late(asked, go)
        waiting = asyncio.ensure_future(caller.echo(peer))
        await asked.wait()
        peer.port._place = None
        if in_use == "stream":
            peer.server.handlers[HANDLER] = silent
        way = await caller.port.way(peer.address, "auto", False)
        assert way.transport == in_use
        go.set()
        await waiting
        assert list(caller.port._connections) == [way.connection]

    carry_out(scenario)


def test_a_look_that_fails_when_no_caller_waits_any_more_is_not_logged() -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller()
        logged: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: logged.append(what))

        async def unreachable(address: str, kind: module.Kind) -> None:
            await asyncio.sleep(0.1)
            raise OSError("no route to host")

        caller.port._asked = unreachable  # type: ignore[method-assign]
        with pytest.raises(DeadlineExceeded):
            await caller.echo(peer, deadline=0.01)
        while caller.port._looking:
            await asyncio.sleep(0.01)
        gc.collect()
        assert logged == []

    carry_out(scenario)


def test_few_strangers_are_greeted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GREETING", 2)

    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller("stream")
        offer = await peer.port.offer("stream")
        assert offer is not None
        strangers = [await asyncio.open_connection(offer["host"], offer["port"]) for _ in range(5)]
        async with asyncio.timeout(module.GREETING_SECONDS / 2):
            for reader, _ in strangers[:3]:  # the oldest
                await reader.read()
            await caller.echo(peer, LARGE)
        assert [by for by, _ in caller.told] == ["stream"]
        assert len(peer.port._greeting) <= 2
        for _, writer in strangers:
            writer.close()

    carry_out(scenario)


def test_a_peer_that_asks_again_and_again_causes_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(places: Places) -> None:
        peer = await places.peer()
        peer.port._address = lambda: "tcp://192.0.2.1:1"  # no address of this host
        for _ in range(3):
            assert await peer.port.offer("stream") is None

    carry_out(scenario)
    assert len([r for r in caplog.records if r.name == "dps.transport"]) == 1


@pytest.mark.parametrize("wanted", ["shared_memory", "stream", "dask"])
def test_bytes_are_counted_by_link_on_every_way(wanted: TransportChoice) -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller(wanted)
        await caller.echo(peer, LARGE)
        expected = wire.size(wire.encode(Weights(1, 0.0, 0, np.zeros(LARGE))))
        assert dict(caller.meter.sent) == dict(caller.meter.received) == {"train": expected}

    carry_out(scenario)


def test_who_may_make_no_memory_sends_streams_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    room, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller()
        for size in (1, LARGE, LARGE):
            await caller.echo(peer, size)
        assert [by for by, _ in caller.told] == ["stream"]
        assert "too large" in caller.told[0][1]

    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
        carry_out(scenario)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
    lines = [r.message for r in caplog.records if r.name == "dps.transport"]
    assert len(lines) == 1
    assert "no shared memory" in lines[0]


def test_who_cannot_map_is_sent_streams_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, size: int) -> memory.Mapping:
        os.close(fd)
        raise OSError(12, "Cannot allocate memory")

    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller()
        await caller.echo(peer)
        with pytest.raises(Unreachable, match="Cannot allocate"):
            await caller.echo(peer, LARGE)
        await caller.echo(peer, LARGE)
        assert [by for by, _ in caller.told] == ["shared_memory", "stream"]

    monkeypatch.setattr(memory, "opened", refuse)
    carry_out(scenario)
