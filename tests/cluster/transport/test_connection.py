"""Connections: what comes is what was sent, on every kind of socket, whoever gives up or ends."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import zlib
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from random import Random

import numpy as np
import pytest

from dps.cluster.backends.tls import temporary
from dps.cluster.transport import connection, memory
from dps.cluster.transport.connection import (
    LARGE_BYTES,
    Connection,
    Handler,
    Lost,
    NoSuchKey,
)
from dps.cluster.transport.framing import (
    DIRECT_BYTES,
    INLINE,
    STAGING_BYTES,
    Description,
    Message,
    Reader,
    described,
    packed,
)
from dps.cluster.transport.framing import Kind as MessageKind
from dps.cluster.transport.memory import Pool
from dps.cluster.transport.sockets import (
    MAGIC,
    MOST_DESCRIPTORS,
    NONCE_BYTES,
    PROOF_BYTES,
    Line,
    Refused,
    to_tcp,
    to_unix,
    welcomed,
)
from dps.errors import RemoteError
from dps.protocol import wire
from dps.protocol.executor import INLINE_BYTES

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

    def _lost(self, connection: Connection, why: str, no_memory: bool) -> None:
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
                return await to_unix(name, secret)
            return await to_tcp("127.0.0.1", listener.getsockname()[1], secret, contexts[0])

        async def accept() -> Line:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            return await welcomed(sock, SECRET, contexts[1])

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
def test_requests_overtake_each_other_and_get_their_own_replies(kind: str) -> None:
    async def late(link: str, *frames: np.ndarray) -> Frames:
        await asyncio.sleep(frames[0][0] / 1000)
        return list(frames)

    async def scenario() -> None:
        async with pair(kind, {"late": late}) as line:
            asked = [np.full(LARGE if i % 3 else 1, 20 - i) for i in range(20)]
            came = await asyncio.gather(*(line.ask(array, key="late") for array in asked))
            for array, (found,) in zip(asked, came, strict=True):
                assert (found == array).all()

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


def test_the_end_of_a_loan_is_told_though_nothing_else_is_said() -> None:
    async def scenario() -> None:
        async with pair("memory") as line:
            (came,) = await line.ask(np.zeros(LARGE), key="copied")
            lent = line.there._loans._lent
            assert len(lent) == 1
            del came
            async with asyncio.timeout(SECONDS):
                while lent:
                    await asyncio.sleep(0.01)

    carry_out(scenario)


def test_the_end_of_a_loan_is_told_however_long_it_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "NEWS_SECONDS", 0.02)

    async def scenario() -> None:
        async with pair("memory") as line:
            (came,) = await line.ask(np.zeros(LARGE), key="copied")
            first, lent = line.here._news, line.there._loans._lent
            async with asyncio.timeout(SECONDS):
                while line.here._news is first:
                    await asyncio.sleep(0.01)
                assert came.sum() == 0
                del came
                while lent:
                    await asyncio.sleep(0.01)

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


def test_what_was_lent_is_passed_on_from_the_same_memory() -> None:
    """From one process to a second and from there to a third, which holds it longest."""

    async def scenario() -> None:
        async with pair("memory") as second:
            kept: list[np.ndarray] = []

            async def keep(link: str, *frames: np.ndarray) -> Frames:
                kept.extend(frames)
                return []

            async def pass_on(link: str, *frames: np.ndarray) -> Frames:
                return await second.ask(*frames, key="keep")

            second.there._handlers["keep"] = keep  # type: ignore[index]
            async with pair("memory", {"pass on": pass_on}) as first:
                for i in range(4):
                    await first.ask(np.full(LARGE, i), key="pass on")
                assert [frame[-1] for frame in kept] == [0, 1, 2, 3]
                assert len(second.pools[0] or ()) == 0  # nothing was copied
                assert len(first.pools[0] or ()) == 4
                second.there.close()  # nobody can say now what the third still holds
                await asyncio.sleep(0)
                nines = np.full(LARGE, 9)
                for several in (1, 1, 8):  # at last more than is free for sure
                    asked = [first.ask(nines, key="copied") for _ in range(several)]
                    await asyncio.gather(*asked)
                assert [(frame == i).all() for i, frame in enumerate(kept)] == [True] * 4
                kept.clear()

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


def test_memory_that_its_maker_gives_back_is_given_back_by_who_knows_it() -> None:
    async def scenario() -> None:
        async with pair("memory") as line:
            pool, known = line.pools[0], line.there._loans._known
            assert pool is not None
            await line.ask(np.ones(LARGE))
            assert len(known) == 1
            pool.close()
            async with asyncio.timeout(SECONDS):
                while known:
                    await asyncio.sleep(0.01)
                    await line.ask()

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


def test_descriptors_that_nobody_takes_are_closed_with_their_line() -> None:
    with nothing_left():
        mine, theirs = socket.socketpair()
        with mine:
            mine.sendmsg([b"1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [0] * 3))])
            line = Line(theirs)
            assert line.receive(memoryview(bytearray(1))) == 1
            assert len(line.descriptors) == 3
            line.close()


def test_who_is_sent_more_descriptors_than_it_has_room_for_knows() -> None:
    mine, theirs = socket.socketpair()
    mine.sendmsg([b"1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [0] * 3))])
    mine.sendmsg([b"2"])
    line, fill = Line(theirs), [os.dup(0)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fill[0] + 1, limits[1]))
    try:
        with suppress(OSError):
            while True:
                fill.append(os.dup(0))
        os.close(fill.pop(0))
        assert line.receive(memoryview(bytearray(1))) == 1
        assert len(line.descriptors) < 3
        assert line.receive(memoryview(bytearray(1))) == 1
        assert line.truncated
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in fill:
            os.close(descriptor)
        line.close()
        mine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_hears_at_once_that_the_other_end_is_gone(kind: str) -> None:
    async def scenario() -> None:
        async def never(link: str, *frames: np.ndarray) -> Frames:
            line.there.close()
            return []

        async with pair(kind, {"never": never}) as line:
            with pytest.raises(Lost, match=r"closed the connection|reset"):
                await line.ask(np.zeros(LARGE), key="never")
            assert line.here.lost
            with pytest.raises(Lost):
                await line.ask()

    carry_out(scenario)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gives_up", ["while sending", "while waiting"])
def test_who_gives_up_as_the_connection_is_lost_leaves_no_complaint(
    kind: str, gives_up: str
) -> None:
    complaints: list[str] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, about: complaints.append(about["message"]))
        asked = asyncio.Event()

        async def never(link: str, *frames: np.ndarray) -> Frames:
            asked.set()
            await asyncio.Event().wait()
            return []

        async with pair(kind, {"never": never}) as line:
            large = np.zeros(INLINE_BYTES // 8 + 1)
            work = asyncio.ensure_future(line.ask(large, key="never"))
            await asyncio.sleep(0)  # one turn of the loop, in which the call begins
            if gives_up == "while waiting":
                await asked.wait()
            line.here.close()
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            del work
            gc.collect()
            line.there.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    carry_out(scenario)
    assert not complaints


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_are_not_there_and_requests_that_fail_are_told_apart(kind: str) -> None:
    async def fail(link: str, *frames: np.ndarray) -> Frames:
        raise ValueError("as it happens")

    async def scenario() -> None:
        async with pair(kind, {"fail": fail}) as line:
            with pytest.raises(NoSuchKey, match="nobody"):
                await line.ask(np.zeros(LARGE), key="nobody")
            with pytest.raises(RemoteError, match="ValueError: as it happens"):
                await line.ask(np.zeros(LARGE), key="fail")
            assert await line.ask() == []

    carry_out(scenario)


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
def test_who_does_not_know_the_secret_is_refused(kind: str) -> None:
    async def scenario() -> None:
        with pytest.raises(Refused):
            await ends(kind, secret=b"t" * 32)

    carry_out(scenario)


def test_who_listens_without_the_secret_is_refused_and_does_not_learn_it() -> None:
    async def scenario() -> None:
        name, heard = secrets.token_hex(8), bytearray()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            listener.setblocking(False)

            async def pretend() -> None:
                loop = asyncio.get_running_loop()
                sock, _ = await loop.sock_accept(listener)
                with sock:
                    await loop.sock_sendall(sock, MAGIC + bytes(NONCE_BYTES))
                    heard.extend(await loop.sock_recv(sock, 4096))
                    await loop.sock_sendall(sock, bytes(PROOF_BYTES))

            pretending = asyncio.ensure_future(pretend())
            with pytest.raises(Refused, match="who"):
                await to_unix(name, SECRET)
            await pretending
        assert heard
        assert SECRET not in heard

    carry_out(scenario)


def test_what_was_overheard_lets_nobody_in() -> None:
    """Neither does it let anybody pass for who listens."""

    async def overhear(name: str, listener: socket.socket) -> tuple[bytes, bytes]:
        """What goes to and fro while one connects that knows the secret."""
        loop = asyncio.get_running_loop()
        joining = asyncio.ensure_future(to_unix(name, SECRET))
        near, _ = await loop.sock_accept(listener)
        far, there = socket.socketpair()
        near.setblocking(False)
        far.setblocking(False)
        welcoming = asyncio.ensure_future(welcomed(there, SECRET, None))
        ways: dict[socket.socket, bytes] = {near: b"", far: b""}

        async def pass_on(of: socket.socket, to: socket.socket) -> None:
            while data := await loop.sock_recv(of, 4096):
                ways[of] += data
                await loop.sock_sendall(to, data)

        passing = [asyncio.ensure_future(pass_on(*way)) for way in ((near, far), (far, near))]
        for line in await asyncio.gather(joining, welcoming):
            line.close()
        await asyncio.gather(*passing)
        near.close()
        far.close()
        return ways[near], ways[far]

    async def scenario() -> None:
        name, loop = secrets.token_hex(8), asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            listener.setblocking(False)
            async with asyncio.timeout(SECONDS):
                asked, answered = await overhear(name, listener)
                again, there = socket.socketpair()
                with again:
                    again.sendall(asked)
                    with pytest.raises(Refused, match="has connected does not know"):
                        await welcomed(there, SECRET, None)
                joining = asyncio.ensure_future(to_unix(name, SECRET))
                sock, _ = await loop.sock_accept(listener)
                with sock:
                    await loop.sock_sendall(sock, answered)
                    with pytest.raises(Refused, match="listens there does not know"):
                        await joining

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
                with pytest.raises(Refused, match="is user 65534"):
                    await welcomed(sock, SECRET, None)
                assert other.wait(SECONDS) == 0  # it was told nothing

    carry_out(scenario)


def test_a_message_may_come_in_pieces_of_any_size() -> None:
    """Some of a large frame comes with the head, the rest right into its place."""
    frame = np.arange(2 * DIRECT_BYTES, dtype=np.uint16).view(np.uint8)[::2].copy()
    begin = packed(
        MessageKind.REQUEST, 1, Description("echo", frames=[described(frame, INLINE, 0)])
    )
    message = begin + frame.tobytes()
    for size in (len(begin), len(begin) + 1, len(begin) + DIRECT_BYTES, len(message)):
        came = read(message, size)
        assert came is not None, f"in pieces of {size} bytes"
        assert (came.frames[0] == frame).all()


def test_a_description_may_be_longer_than_what_is_received_at_once() -> None:
    text = "long" * STAGING_BYTES
    came = read(packed(MessageKind.FAILED, 1, Description(text)), STAGING_BYTES)
    assert came is not None
    assert came.about.text == text


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


def test_what_is_no_message_ends_the_connection_and_nothing_else() -> None:
    async def scenario() -> None:
        for garbage in (b"\xff" * 64, b"\1\0\0\0\xff\xff\xff\xff" + b"\0" * 8, b"\1" + b"\0" * 15):
            lines = await ends("unix")
            why: list[str] = []

            def lost(_: Connection, text: str, __: bool, why: list[str] = why) -> None:
                why.append(text)

            end = Connection(lines[1], {}, None, lost)
            lines[0].send([memoryview(garbage)], ())
            async with asyncio.timeout(SECONDS):
                while not end.lost:
                    await asyncio.sleep(0.01)
            assert "no message of dps" in why[0]
            lines[0].close()

    carry_out(scenario)


def test_what_there_is_no_memory_for_ends_the_connection() -> None:
    async def scenario() -> None:
        lines = await ends("unix")
        why: list[str] = []
        end = Connection(lines[1], {}, None, lambda _, text, __: why.append(text))
        about = Description("echo", "train", [("|u1", (1 << 60,), -1, 0)])
        lines[0].send([memoryview(packed(MessageKind.REQUEST, 1, about))], ())
        async with asyncio.timeout(SECONDS):
            while not end.lost:
                await asyncio.sleep(0.01)
        assert "no memory here" in why[0]
        lines[0].close()

    carry_out(scenario)


def test_what_is_refused_leaves_nothing_on_loan() -> None:
    async def scenario() -> None:
        async with pair("memory") as line:
            with pytest.raises(TypeError, match="object cannot cross"):
                await line.ask(np.ones(LARGE), np.array([object()]))
            assert not line.here._loans._lent
            assert (await line.ask(np.ones(LARGE)))[0].sum() == LARGE

    carry_out(scenario)


def test_a_message_may_be_of_more_segments_than_it_can_bring() -> None:
    async def scenario() -> None:
        async with pair("memory") as line:
            pool = line.pools[0]
            assert pool is not None
            frames = [pool.empty((LARGE,), np.dtype(np.uint8)) for _ in range(MOST_DESCRIPTORS + 5)]
            for mark, frame in enumerate(frames):
                frame[:] = mark
                frame.flags.writeable = False
            for _ in range(2):
                back = await line.ask(*frames)
                assert [frame[-1] for frame in back] == list(range(len(frames)))
            assert line.why == []

    carry_out(scenario)


def test_arrays_of_objects_are_refused_by_who_sends_them() -> None:
    async def wrong(link: str, *frames: np.ndarray) -> Frames:
        return [np.array([object()])]

    async def scenario() -> None:
        async with pair("tcp", {"wrong": wrong}) as line:
            with pytest.raises(TypeError, match="object cannot cross"):
                await line.ask(np.array([object()]))
            with pytest.raises(RemoteError, match="TypeError: arrays of object cannot cross"):
                await line.ask(key="wrong")
            assert await line.ask() == []

    carry_out(scenario)


def test_without_memory_arrays_go_through_the_socket_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(size: int) -> memory.Mapping:
        raise OSError(28, "No space left on device")

    async def scenario() -> None:
        async with pair("memory") as line:
            for _ in range(3):
                (came,) = await line.ask(np.ones(LARGE), key="copied")
                assert came.sum() == LARGE

    monkeypatch.setattr(memory, "create", refuse)
    carry_out(scenario)
    lines = [record for record in caplog.records if "no memory to share" in record.message]
    assert len(lines) == 2  # one of each end


def test_who_cannot_map_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, size: int) -> memory.Mapping:
        os.close(fd)
        raise OSError(12, "Cannot allocate memory")

    async def scenario() -> None:
        async with pair("memory") as line:
            with pytest.raises(Lost, match=r"cannot map memory: .*Cannot allocate"):
                await line.ask(np.ones(LARGE))

    monkeypatch.setattr(memory, "opened", refuse)
    carry_out(scenario)


# -- kills -----------------------------------------------------------------------------------------

SENDER = """
import asyncio, sys, zlib
import numpy as np
from dps.cluster.transport.connection import Connection
from dps.cluster.transport.memory import Pool
from dps.cluster.transport.sockets import to_tcp, to_unix

async def main(kind, where, size):
    secret = b"s" * 32
    tcp = kind == "tcp"
    to = to_tcp("127.0.0.1", int(where), secret, None) if tcp else to_unix(where, secret)
    line = await to
    connection = Connection(line, {}, Pool() if kind == "memory" else None, lambda *_: None)
    async def send(mark):
        values = np.empty(size, np.uint8)
        while True:
            values[:] = mark
            mark = (mark + 7) % 251
            checksum = np.array([zlib.crc32(values)])
            await connection.call("check", "train", [values, checksum])
    await asyncio.gather(send(1), send(2), send(3))

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "unix", "tcp"])
def test_no_torn_message_is_ever_seen_however_its_sender_is_killed(kind: str) -> None:
    random = Random(kind)

    async def scenario() -> None:
        sound, torn, first = 0, 0, 1
        kept: list[tuple[np.ndarray, int]] = []

        async def check(link: str, *frames: np.ndarray) -> Frames:
            nonlocal sound, torn
            values, checksum = frames
            if zlib.crc32(values.data) == checksum[0]:
                sound += 1
            else:
                torn += 1
            if sound == first or random.random() < 0.05:
                kept.append((values, int(checksum[0])))
            return []

        family = socket.AF_INET if kind == "tcp" else socket.AF_UNIX
        name = secrets.token_hex(8)
        loop = asyncio.get_running_loop()
        with socket.socket(family) as listener:
            listener.bind(("127.0.0.1", 0) if kind == "tcp" else f"\0{name}")
            listener.listen()
            listener.setblocking(False)
            where = str(listener.getsockname()[1]) if kind == "tcp" else name
            for _ in range(8):
                process = subprocess.Popen(
                    [sys.executable, "-c", SENDER, kind, where, str(2 << 20)],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                )
                sock, _ = await loop.sock_accept(listener)
                line = await welcomed(sock, SECRET, None)
                connection = Connection(line, {"check": check}, Pool(), lambda *_: None)
                first, enough = sound + 1, sound + random.randrange(1, 20)
                async with asyncio.timeout(SECONDS):
                    while sound < enough:
                        await asyncio.sleep(0.001)
                await asyncio.sleep(random.random() / 50)
                process.send_signal(signal.SIGKILL)
                process.wait()
                async with asyncio.timeout(SECONDS):
                    while not connection.lost:
                        await asyncio.sleep(0.01)
        assert torn == 0
        assert kept
        assert all(zlib.crc32(values.data) == checksum for values, checksum in kept)
        kept.clear()

    carry_out(scenario)
