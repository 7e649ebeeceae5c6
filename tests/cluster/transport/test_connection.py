"""Connections: what comes is what was sent, on every kind of socket, whoever gives up or ends."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from dps.cluster.backends.tls import temporary
from dps.cluster.transport.connection import LARGE_BYTES, Connection, Handler
from dps.cluster.transport.memory import Pool
from dps.cluster.transport.stream import (
    DIRECT_BYTES,
    MAX_DESCRIPTORS,
    Description,
    Line,
    Message,
    Reader,
    Refused,
    described,
    greeted,
    packed,
    to_tcp,
)
from dps.cluster.transport.stream import Kind as MessageKind
from dps.errors import RemoteError
from dps.protocol import wire

SECONDS = 20.0
SECRET = b"s" * 32
KINDS = ["memory", "unix", "tcp", "tls"]
LARGE = 3 * LARGE_BYTES

Frames = wire.Frames


async def echo(link: str, *frames: np.ndarray) -> Frames:
    return list(frames)


async def copied(link: str, *frames: np.ndarray) -> Frames:
    """What lies nowhere but in this process."""
    return [frame.copy() for frame in frames]


class Pair:
    """Two connected ends in this process: `here` asks, `there` answers."""

    def __init__(self, ends: list[Line], handlers: dict[str, Handler], memory: bool) -> None:
        self.pools = [Pool() if memory else None for _ in ends]
        self.why: list[str] = []
        self.here, self.there = (
            Connection(end, handlers, pool, self._lost)
            for end, pool in zip(ends, self.pools, strict=True)
        )

    def _lost(self, connection: Connection, why: str, avoid: bool) -> None:
        self.why.append(why)

    async def ask(self, *frames: np.ndarray, key: str = "echo", seconds: float = SECONDS) -> Frames:
        async with asyncio.timeout(seconds):
            return await self.here.call(key, "train", list(frames))


@asynccontextmanager
async def pair(kind: str, handlers: dict[str, Handler] | None = None) -> AsyncIterator[Pair]:
    known = {"echo": echo, "copied": copied, **(handlers or {})}
    found = Pair(await ends(kind), known, kind == "memory")
    try:
        yield found
    finally:
        found.here.close()
        found.there.close()
        for pool in found.pools:
            if pool is not None:
                pool.close()


async def ends(kind: str, secret: bytes = SECRET) -> list[Line]:
    """Two connected lines; the first one believes in `secret`."""
    contexts = tls() if kind == "tls" else (None, None)
    family = socket.AF_INET if kind in ("tcp", "tls") else socket.AF_UNIX
    name = secrets.token_hex(8)
    with socket.socket(family) as listener:
        listener.bind(("127.0.0.1", 0) if family == socket.AF_INET else f"\0{name}")
        listener.listen()
        listener.setblocking(False)

        async def connect() -> Line:
            if family == socket.AF_UNIX:
                return await greeted(socket.socket(family), secret, address=f"\0{name}")
            return await to_tcp("127.0.0.1", listener.getsockname()[1], secret, contexts[0])

        async def accept() -> Line:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            return await greeted(sock, SECRET, contexts[1])

        lines = await asyncio.gather(connect(), accept(), return_exceptions=True)
    for line in lines:
        if isinstance(line, BaseException):
            for other in lines:
                if isinstance(other, Line):
                    other.close()
            raise line
    return lines  # type: ignore[return-value]


def tls() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of who connects and who listens, as Dask makes them."""
    security = temporary()
    caller = security.get_connection_args("worker")["ssl_context"]
    return caller, security.get_listen_args("worker")["ssl_context"]


def carry_out(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario; no descriptor and no segment may be left."""
    with nothing_left():
        asyncio.run(scenario())  # type: ignore[arg-type]


@contextmanager
def nothing_left() -> Iterator[None]:
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), mapped()
    yield
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), mapped()) == before


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:dps")


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_back_is_what_was_sent(kind: str) -> None:
    random = np.random.default_rng(0)
    arrays: list[np.ndarray] = [
        np.zeros(0),
        np.array(3.5),
        np.array([True, False]),
        np.arange(12, dtype=">i4").reshape(3, 4).T,
        random.standard_normal(LARGE).astype(np.float32),
        random.standard_normal((LARGE // 64, 8)).astype(np.float16)[:, ::2],
        np.asfortranarray(random.standard_normal((100, LARGE // 100))),
        np.array(["2020-01-01"], "datetime64[D]"),
        random.integers(0, 256, 5 << 20).astype(np.uint8),
    ]

    async def scenario() -> None:
        async with pair(kind) as line:
            for key in ("echo", "copied", "echo"):
                back = await line.ask(*arrays, key=key)
                assert len(back) == len(arrays)
                for array, found in zip(arrays, back, strict=True):
                    assert (found.dtype, found.shape) == (array.dtype, array.shape)
                    assert found.tobytes() == array.tobytes()
                    assert not found.flags.writeable

    carry_out(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_reply_is_discarded_and_the_connection_goes_on(kind: str) -> None:
    async def scenario() -> None:
        go = asyncio.Event()

        async def late(link: str, *frames: np.ndarray) -> Frames:
            await go.wait()
            return [frame + 1 for frame in frames]

        async with pair(kind, {"late": late}) as line:
            for size in (1, LARGE):
                with pytest.raises(TimeoutError):
                    await line.ask(np.zeros(size), key="late", seconds=0.05)
            go.set()
            for _ in range(3):
                assert (await line.ask(np.ones(LARGE)))[0].sum() == LARGE
            assert line.why == []

    carry_out(scenario)


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
def test_who_gives_up_half_way_may_change_what_it_was_sending(kind: str) -> None:
    """The message goes on as it was: never half of it as it was and half as it is now."""

    async def scenario() -> None:
        came: list[np.ndarray] = []

        async def keep(link: str, *frames: np.ndarray) -> Frames:
            came.extend(frames)
            return []

        async with pair(kind, {"keep": keep}) as line:
            values = np.zeros(32 << 20, np.uint8)
            asking = asyncio.ensure_future(line.here.call("keep", "train", [values]))
            await asyncio.sleep(0)  # it has sent what the socket takes
            asking.cancel()
            await asyncio.wait([asking])
            values[:] = 1
            await line.ask(np.zeros(1))
            assert all(not array.any() for array in came)

    carry_out(scenario)


def test_who_gives_up_what_tls_has_taken_leaves_the_connection_whole() -> None:
    """TLS says that nothing was sent, and has encrypted some of it."""

    async def scenario() -> None:
        async with pair("tls") as line:
            loop, descriptor = asyncio.get_running_loop(), line.there._line.sock.fileno()
            loop.remove_reader(descriptor)
            asking = []
            while not line.here._writing:
                asking.append(asyncio.ensure_future(line.ask(np.ones(1000))))
                await asyncio.sleep(0)
            asking[-1].cancel()
            await asyncio.wait(asking[-1:])
            loop.add_reader(descriptor, line.there._readable)
            assert (await line.ask(np.ones(1)))[0][0] == 1
            await asyncio.gather(*asking[:-1])
            assert line.why == []

    carry_out(scenario)


def test_memory_on_loan_is_not_filled_again_and_then_is() -> None:
    async def scenario() -> None:
        async with pair("memory") as line:
            pool = line.pools[1]
            assert pool is not None
            kept = [(await line.ask(np.full(LARGE, i), key="copied"))[0] for i in range(5)]
            assert [array[-1] for array in kept] == [0, 1, 2, 3, 4]
            assert all((array == i).all() for i, array in enumerate(kept))
            assert len(pool) == 5
            view = kept.pop()[5:]
            kept.clear()
            for _ in range(20):
                assert (await line.ask(np.zeros(LARGE), key="copied"))[0][0] == 0
            assert len(pool) <= 7
            assert (view == 4).all()

    carry_out(scenario)


def test_frozen_arrays_of_the_pool_are_sent_as_they_lie_and_others_are_copied() -> None:
    async def scenario() -> None:
        kept: list[np.ndarray] = []

        async def keep(link: str, *frames: np.ndarray) -> Frames:
            kept.extend(frames)
            return []

        async with pair("memory", {"keep": keep}) as line:
            pool = line.pools[0]
            assert pool is not None
            array = pool.empty((LARGE,), np.dtype(np.float32))
            array[:] = 1
            await line.ask(array, key="keep")
            array[:] = 2
            array.flags.writeable = False
            await line.ask(array, key="keep")
            assert [frame[0] for frame in kept] == [1, 2]
            assert len(pool) == 2  # one of them is a copy
            del array
            again = pool.empty((LARGE,), np.dtype(np.float32))
            again[:] = 3
            assert [frame[0] for frame in kept] == [1, 2]
            kept.clear()
            del again

    carry_out(scenario)


def test_what_is_on_loan_when_a_connection_is_lost_is_never_filled_again() -> None:
    async def scenario() -> None:
        pool = Pool()
        lines = await ends("memory")

        def lost(*_: object) -> None: ...

        here = Connection(lines[0], {}, Pool(), lost)
        there = Connection(lines[1], {"copied": copied}, pool, lost)
        (kept,) = await here.call("copied", "train", [np.ones(LARGE)])
        assert len(pool) == 1
        here.close()
        async with asyncio.timeout(SECONDS):
            while not there.lost:
                await asyncio.sleep(0.01)
        for _ in range(3):
            pool.filled([np.zeros(LARGE)])
        assert (kept == 1).all()

    carry_out(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_retired_still_gets_the_replies_that_it_waits_for(kind: str) -> None:
    async def scenario() -> None:
        go = asyncio.Event()

        async def late(link: str, *frames: np.ndarray) -> Frames:
            await go.wait()
            return list(frames)

        async with pair(kind, {"late": late}) as line:
            asking = [asyncio.ensure_future(line.ask(np.ones(3), key="late")) for _ in range(2)]
            await asyncio.sleep(0)
            line.here.retire()
            assert not line.here.lost
            go.set()
            assert [float(came.sum()) for (came,) in await asyncio.gather(*asking)] == [3.0, 3.0]
            assert line.here.lost

    carry_out(scenario)


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
def test_who_does_not_know_the_secret_is_refused(kind: str) -> None:
    async def scenario() -> None:
        with pytest.raises(Refused):
            await ends(kind, secret=b"t" * 32)

    carry_out(scenario)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_refused() -> None:
    async def scenario() -> None:
        name = secrets.token_hex(8)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            program = "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX)"
            program += f"; s.connect('\\x00{name}'); sys.exit(len(s.recv(1)))"
            with subprocess.Popen([sys.executable, "-c", program]) as other:
                sock, _ = await asyncio.to_thread(listener.accept)
                with pytest.raises(Refused, match="belongs to user 65534"):
                    await greeted(sock, SECRET)
                assert other.wait(SECONDS) == 0  # it was told nothing

    carry_out(scenario)


def test_a_message_may_come_in_pieces_of_any_size() -> None:
    """Some of a large frame comes with the head, the rest right into its place."""
    frame = np.arange(2 * DIRECT_BYTES, dtype=np.uint16).view(np.uint8)[::2].copy()
    begin = packed(MessageKind.REQUEST, 1, Description("echo", frames=[described(frame)]))
    message = begin + frame.tobytes()
    for size in (len(begin), len(begin) + 1, len(begin) + DIRECT_BYTES, len(message)):
        came = read(message, size)
        assert came is not None, f"in pieces of {size} bytes"
        assert (came.frames[0] == frame).all()


def read(message: bytes, size: int) -> Message | None:
    """What a reader makes of the bytes of one message, which come in pieces."""
    reader, left, came = Reader(), memoryview(message), None
    while left:
        room = reader.room()
        count = min(size, len(room), len(left))
        assert count, "there is no room for what is missing"
        room[:count] = left[:count]
        reader.received(count)
        left, came = left[count:], reader.take()
    assert reader.is_between
    return came


def test_a_message_may_be_of_more_segments_than_it_can_bring() -> None:
    async def scenario() -> None:
        async with pair("memory") as line:
            pool = line.pools[0]
            assert pool is not None
            frames = [pool.empty((LARGE,), np.dtype(np.uint8)) for _ in range(MAX_DESCRIPTORS + 5)]
            for mark, frame in enumerate(frames):
                frame[:] = mark
                frame.flags.writeable = False
            for _ in range(2):
                back = await line.ask(*frames)
                assert [frame[-1] for frame in back] == list(range(len(frames)))
            assert line.why == []

    carry_out(scenario)


def test_arrays_of_objects_are_refused_by_who_sends_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def wrong(link: str, *frames: np.ndarray) -> Frames:
        return [np.array([object()])]

    async def scenario() -> None:
        async with pair("memory", {"wrong": wrong}) as line:
            with pytest.raises(TypeError, match="object cannot cross"):
                await line.ask(np.ones(LARGE), np.array([object()]))
            assert not line.here._loans._lent
            with pytest.raises(RemoteError, match="TypeError: arrays of object cannot cross"):
                await line.ask(key="wrong")
            assert "in described\n" in caplog.messages[0]  # the traceback
            assert await line.ask() == []

    carry_out(scenario)
