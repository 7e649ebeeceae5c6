"""Which way messages take to a peer, why, and what happens when that way does not work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed.core import ConnectionPool, Server

from dps.cluster.transport import memory
from dps.cluster.transport import port as module
from dps.cluster.transport.calls import ClusterTransport, Meter, meter_of
from dps.cluster.transport.links import Closed, Late, Links
from dps.cluster.transport.port import HANDLER, Port
from dps.errors import DeadlineExceeded, NotServing, Unreachable
from dps.protocol import wire
from dps.protocol.messages import Flush, Weights
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
        port.serve("echo", echo)
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
        ({"boot": "another"}, "on another host"),
        ({"user": 12345}, "of another user"),
        ({"network": "another"}, "in another network namespace"),
        ({"refusal": "memory is full"}, "no shared memory: memory is full"),
    ],
)
def test_processes_that_cannot_share_memory_send_streams(
    difference: dict[str, object], why: str
) -> None:
    async def scenario(places: Places) -> None:
        peer = await places.peer()
        for wanted, by in (("auto", "stream"), ("shared_memory", "dask")):
            caller = await places.caller(wanted)  # type: ignore[arg-type]
            caller.port._place = replace(caller.port._here(), **difference)  # type: ignore[arg-type]
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
        assert caller.port._connections == set(kept) - {None}  # the stream is ended

    carry_out(scenario)


def test_a_peer_that_closes_and_opens_again_is_reached_again() -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller()
        for _ in range(3):
            await caller.echo(peer, LARGE)
            peer.port.exit()
            peer.port.enter()
            peer.port.serve("echo", echo)
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


def test_a_port_stays_open_until_its_last_user_has_left() -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller()
        peer.port.enter()
        caller.port.enter()
        await caller.echo(peer, LARGE)
        before = set(caller.port._connections)
        peer.port.exit()
        caller.port.exit()
        await caller.echo(peer, LARGE)
        assert caller.port._connections == before
        assert await peer.port.offer("shared_memory") is not None

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


def test_who_cannot_be_accepted_for_want_of_descriptors_is_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And is not tried without end until then, with a line in the log each time."""

    async def scenario(places: Places) -> None:
        peer = await places.peer()
        offer = await peer.port.offer("shared_memory")
        assert offer is not None
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (sock.fileno() + 1, limits[1]))
            fill = []
            try:
                with contextlib.suppress(OSError):
                    while True:
                        fill.append(os.dup(sock.fileno()))
                sock.connect("\0" + offer["name"])
                async with asyncio.timeout(SECONDS):
                    while "could not be accepted" not in caplog.text:
                        await asyncio.sleep(0.01)
                for _ in range(100):
                    await asyncio.sleep(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for descriptor in fill:
                    os.close(descriptor)
            assert caplog.text.count("could not be accepted") < 10
            async with asyncio.timeout(SECONDS):
                assert await asyncio.get_running_loop().sock_recv(sock, 1)

    carry_out(scenario)


@pytest.mark.parametrize("wanted", ["auto", "stream"])
def test_a_peer_that_does_not_say_how_it_is_reached_is_called_by_dask(
    wanted: TransportChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_SECONDS", 0.1)

    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller(wanted)

        async def silent(kind: module.Kind) -> object:
            await asyncio.sleep(SECONDS)
            return None

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
        assert "nothing came by stream" in caller.told[-1][1]

    carry_out(scenario)


def test_a_connection_is_kept_when_the_reply_alone_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server may hold a request for long; and a peer that is paused answers by no connection."""
    monkeypatch.setattr(module, "ASK_SECONDS", 0.2)

    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller()
        go = asyncio.Event()

        async def late(link: str, *frames: np.ndarray) -> wire.Frames:
            await go.wait()
            return list(frames)

        async def silent(kind: module.Kind) -> object:
            await asyncio.sleep(SECONDS)
            return None

        for handler in (peer.port.offer, silent):
            peer.port.serve("echo", late)
            await caller.port.way(peer.address, "auto", False)
            kept = set(caller.port._connections)
            peer.server.handlers[HANDLER] = handler
            with pytest.raises(DeadlineExceeded):
                await caller.echo(peer, deadline=0.05)
            while caller.port._tests:
                await asyncio.sleep(0.01)
            go.set()
            await caller.echo(peer)
            assert caller.port._connections == kept
            go.clear()

    carry_out(scenario)


def test_connections_that_do_not_greet_take_few_descriptors_and_keep_nobody_out() -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller("stream")
        offer = await peer.port.offer("stream")
        assert offer is not None
        with contextlib.ExitStack() as silent:
            for _ in range(3 * module.MOST_GREETING):
                at = offer["host"], offer["port"]
                silent.enter_context(socket.create_connection(at, timeout=SECONDS))
                await asyncio.sleep(0)
            await caller.echo(peer, LARGE)
            assert caller.told == [("stream", "as chosen")]
            assert len(peer.port._greeting) <= module.MOST_GREETING

    carry_out(scenario)


def test_of_connections_that_do_not_greet_the_oldest_makes_room() -> None:
    """The one before the last may be that of a peer, which is about to greet."""

    async def scenario(places: Places) -> None:
        peer = await places.peer()
        offer = await peer.port.offer("stream")
        assert offer is not None
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as silent:
            async with asyncio.timeout(module.GREETING_SECONDS - 1):
                for number in range(module.MOST_GREETING + 1):
                    sock = silent.enter_context(socket.socket())
                    sock.setblocking(False)
                    await loop.sock_connect(sock, (offer["host"], offer["port"]))
                    if not number:
                        oldest = sock
                while await loop.sock_recv(oldest, 1 << 10):  # what it is told, and then its end
                    pass
            assert len(peer.port._greeting) == module.MOST_GREETING

    carry_out(scenario)


@pytest.mark.parametrize("kind", ["shared_memory", "stream"])
def test_a_connection_that_does_not_greet_is_ended(
    kind: module.Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GREETING_SECONDS", 0.2)

    async def scenario(places: Places) -> None:
        peer = await places.peer()
        offer = await peer.port.offer(kind)
        assert offer is not None
        on_host = kind == "shared_memory"
        family = socket.AF_UNIX if on_host else socket.AF_INET
        at = "\0" + offer["name"] if on_host else (offer["host"], offer["port"])
        loop = asyncio.get_running_loop()
        with socket.socket(family) as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, at)
            async with asyncio.timeout(SECONDS):
                while await loop.sock_recv(sock, 1 << 10):  # what it says, and then its end
                    pass
        assert not peer.port._greeting

    carry_out(scenario)


def test_an_address_that_is_not_its_own_gets_no_stream_and_opens_no_other_door(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(places: Places) -> None:
        peer = await places.peer()
        peer.port._address = lambda: "tcp://192.0.2.1:8786"  # reserved: no machine has it
        for _ in range(2):
            assert await peer.port.offer("stream") is None
        assert not peer.port._listeners
        caller = await places.caller()
        await caller.echo(peer, LARGE)
        assert caller.told == [("shared_memory", "on the same host")]

    carry_out(scenario)
    assert caplog.text.count("no stream to this process") == 1


@pytest.mark.parametrize("wanted", ["shared_memory", "stream"])
def test_small_messages_have_a_connection_of_their_own(wanted: TransportChoice) -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller(wanted)
        large, small = [
            (await caller.port.way(peer.address, wanted, large)).connection
            for large in (True, False)
        ]
        assert large is not small
        assert None not in (large, small)
        assert (await caller.port.way(peer.address, wanted, True)).connection is large

    carry_out(scenario)


def test_many_first_calls_share_one_connection() -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller()
        await asyncio.gather(*(caller.echo(peer) for _ in range(20)))
        assert len(caller.port._connections) == 1

    carry_out(scenario)


def test_who_gives_up_while_a_connection_is_made_leaves_it_to_others() -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller()
        begun, go = asyncio.Event(), asyncio.Event()
        offer = peer.port.offer

        async def late(kind: module.Kind) -> object:
            begun.set()
            await go.wait()
            return await offer(kind)

        peer.server.handlers[HANDLER] = late
        waiting = asyncio.ensure_future(caller.echo(peer))
        with pytest.raises(DeadlineExceeded):
            await caller.echo(peer, deadline=0.05)
        await begun.wait()
        go.set()
        await waiting

    carry_out(scenario)


@pytest.mark.parametrize("wanted", ["shared_memory", "stream", "dask"])
def test_bytes_are_counted_by_link_on_every_way(wanted: TransportChoice) -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller(wanted)
        await caller.echo(peer, LARGE)
        expected = wire.size(wire.encode(Weights(1, 0.0, 0, np.zeros(LARGE))))
        assert dict(caller.meter.sent) == dict(caller.meter.received) == {"train": expected}

    carry_out(scenario)


def test_each_group_on_a_node_has_its_bytes_counted_from_0() -> None:
    node: Any = SimpleNamespace()  # of Dask's worker, nothing is needed
    first = meter_of(node, "group-1")
    first.sent["train"] += 7
    assert meter_of(node, "group-1") is first
    assert not meter_of(node, "group-2").sent


def test_what_is_counted_as_received_is_the_reply() -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller()
        reply = wire.encode(Weights(1, 0.0, 0, np.zeros(LARGE)))

        async def read(link: str, *frames: np.ndarray) -> wire.Frames:
            return reply

        peer.port.serve("read", read)
        await caller.transport.call(Endpoint(peer.address, "read"), Flush(), SECONDS, "train")
        assert caller.meter.sent["train"] == wire.size(wire.encode(Flush()))
        assert caller.meter.received["train"] == wire.size(reply)

    carry_out(scenario)


@pytest.mark.parametrize("wanted", ["shared_memory", "stream", "dask"])
def test_links_that_are_cut_or_slow_hold_messages_on_every_way(wanted: TransportChoice) -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller(wanted)
        loop = asyncio.get_running_loop()
        await caller.echo(peer, LARGE)
        caller.links.impose(1, Closed(), SECONDS)
        with pytest.raises(DeadlineExceeded):
            await caller.echo(peer, LARGE, deadline=0.1)
        waiting = asyncio.ensure_future(caller.echo(peer, LARGE))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        caller.links.lift(1)
        await waiting
        caller.links.impose(2, Late(0.2), SECONDS)
        began = loop.time()
        await caller.echo(peer)
        assert loop.time() - began >= 0.4
        caller.links.lift(2)
        assert caller.links.affected(2) == 2

    carry_out(scenario)


@pytest.mark.parametrize("wanted", ["auto", "stream"])
def test_errors_are_the_same_on_every_way(wanted: TransportChoice) -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller(wanted)
        with pytest.raises(NotServing, match="nobody"):
            await caller.transport.call(Endpoint(peer.address, "nobody"), Flush(), SECONDS)
        await peer.server.close()
        peer.port.exit()
        with pytest.raises(Unreachable):
            await caller.transport.call(Endpoint(peer.address, "echo"), Flush(), SECONDS)
        peer.port.enter()

    carry_out(scenario)


def test_a_defect_on_the_way_is_not_taken_for_a_peer_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller()

        async def lost(*_: object) -> None:
            {}["way"]

        monkeypatch.setattr(caller.port, "way", lost)
        with pytest.raises(KeyError, match="way"):
            await caller.echo(peer)

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
    assert len(lines) == 2  # one of each side
    assert all("no shared memory" in line for line in lines)


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


def test_an_array_of_the_transport_is_sent_as_it_lies() -> None:
    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller()
        array = caller.transport.empty((LARGE,), np.dtype(np.float64))
        array[:] = 7
        array.flags.writeable = False
        to = Endpoint(peer.address, "echo")
        back = await caller.transport.call(to, Weights(1, 0.0, 0, array), SECONDS)
        assert (back.values == 7).all()
        assert len(caller.port.pool) == 1

    carry_out(scenario)


FEW = """
import resource, sys
sys.path[:0] = {path!r}
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
from tests.cluster.transport.test_port import few
few()
"""


def few() -> None:
    """Keep more replies than there are descriptors for; what `FEW` runs in a process of its own."""

    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller()
        to = Endpoint(peer.address, "echo")
        kept = []
        for i in range(60):
            values = np.full(LARGE, float(i))
            reply = await caller.transport.call(to, Weights(1, 0.0, 0, values), SECONDS)
            kept.append(reply.values)
        assert [values[-1] for values in kept] == list(range(60))
        assert len(os.listdir("/proc/self/fd")) < 48

    carry_out(scenario)


def test_descriptors_that_run_short_cost_copies_and_nothing_else() -> None:
    program = FEW.format(path=sys.path)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


SMALL = """
import os, sys
sys.path[:0] = {path!r}
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 1 << 20
from tests.cluster.transport.test_port import plenty
plenty()
assert os.listdir("/dev/shm") == []
"""


def plenty() -> None:
    """Have much more on loan than a small /dev/shm holds; what `SMALL` runs."""

    async def scenario(places: Places) -> None:
        peer, caller = await places.peer(), await places.caller("shared_memory")
        for _ in range(3):
            await asyncio.gather(*(caller.echo(peer, 1 << 21) for _ in range(4)))
        assert [by for by, _ in caller.told] == ["shared_memory"]
        assert not caller.port.pool.failed

    carry_out(scenario)


@pytest.mark.slow
def test_the_size_of_dev_shm_is_no_limit() -> None:
    unshare = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"']
    if os.getuid() or subprocess.run([*unshare, "-", "true"], check=False).returncode:
        pytest.skip("no right to mount a small /dev/shm")
    program = [sys.executable, "-c", SMALL.format(path=sys.path)]
    subprocess.run([*unshare, "-", *program], check=True, timeout=60)
