"""Requests and replies over one connection: many in flight at once, large frames not copied.

On a unix socket arrays travel in segments of memory (`dps.cluster.transport.memory`), which are
lent to the receiver. A loan lasts until the last view of it there is gone, and the next message
reports its end to the sender. When a connection is lost, the ends of loans cannot be reported any
more, so the segments on loan are never filled again.

Received messages are not unpickled, and cannot name code.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import prod
from typing import Any, Protocol

import numpy as np

from dps.cluster.transport import memory
from dps.cluster.transport.memory import Held, Pool
from dps.cluster.transport.stream import (
    INLINE,
    MAX_DESCRIPTORS,
    Description,
    Kind,
    Line,
    Message,
    Reader,
    described,
    dtype_of,
    packed,
)
from dps.errors import RemoteError
from dps.protocol import wire
from dps.protocol.executor import INLINE_BYTES, offload
from dps.protocol.tasks import Tasks

LARGE_BYTES = 1 << 16  # a frame of this size costs less in a segment than through the socket
JOIN_BYTES = 1 << 14  # copying a message of this size costs less than sending it in parts
BUDGET_BYTES = 4 << 20  # received or sent before the event loop has its turn
PARTS = 64
NO_KEY = ""  # that no handler has, so a request for it is refused at once
NEWS_SECONDS = 0.5  # after which the end of a loan is reported by a separate message

# Carries out a request; returns the frames of its reply, or what to await for them.
Handler = Callable[..., wire.Frames | Coroutine[Any, Any, wire.Frames]]
Place = tuple[Held, int]  # a segment, and the offset of a frame in it

_log = logging.getLogger("dps.transport")


class Lost(ConnectionError):
    """The connection ended before the reply came."""


class NoSuchKey(LookupError):
    """The process at the other end does not serve the key."""


def log_failure(error: Exception) -> str:
    """Log the exception of a request; return it as text for the caller, which must not retry."""
    # As text: a log that keeps the traceback would keep the arrays, and their segments.
    _log.error("a request failed:\n%s", "".join(traceback.format_exception(error)))
    return f"{type(error).__name__}: {error}"


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A message that is being sent; if `begun`, some of it may have left."""

    buffers: list[memoryview]
    descriptors: Sequence[int]
    begun: bool = False

    def advance(self, sent: int) -> None:
        self.descriptors = ()
        while self.buffers and sent >= len(self.buffers[0]):
            sent -= len(self.buffers.pop(0))
        if sent:
            self.buffers[0] = self.buffers[0][sent:]


class Arrival(Protocol):
    """Where a reply arrives, such as an `asyncio.Future`."""

    def done(self) -> bool:
        """Whether it has arrived, or is not awaited any more."""
        ...

    def set_result(self, result: wire.Frames, /) -> None:
        """Take the frames of the reply."""

    def set_exception(self, exception: Exception, /) -> None:
        """Take what `Connection.call` raises."""


class Connection:
    """One end of a connection between two processes. Used from its event loop."""

    def __init__(
        self,
        line: Line,
        handlers: Mapping[str, Handler],  # carry out requests, by key
        pool: Pool | None,  # provides segments for large frames
        # Called once with the reason, and whether to avoid such connections for a while.
        on_lost: Callable[[Connection, str, bool], None],
    ) -> None:
        self._line = line
        self._fd = line.sock.fileno()
        self._handlers = handlers
        self._pool = pool if line.passes_memory else None
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._reader = Reader()
        self._queue: deque[_Outgoing] = deque()
        self._writing = False
        self._requests = count(1)
        self._waiting: dict[int, Arrival] = {}
        self._replies = Tasks(lambda error: self.close(f"a reply could not be sent: {error!r}"))
        self._loans = _Loans()
        self._news: asyncio.TimerHandle | None = None
        self._received_bytes = self._sent_bytes = 0
        self._retired = False
        self.lost = False  # whether it is unusable
        self._loop.add_reader(self._fd, self._readable)

    def begin(self, key: str, link: str, frames: wire.Frames, arrival: Arrival) -> int:
        """Send a small request, which is copied; return its number, for `forget`.

        The arrival gets the reply, or what `call` raises, but not before this returns. `Lost` if
        the connection is.
        """
        number = next(self._requests)
        self._sent(Kind.REQUEST, number, Description(key, link), frames, [None] * len(frames))
        if self.lost:  # as sending has shown
            raise Lost("the connection is lost")
        self._waiting[number] = arrival
        return number

    def forget(self, number: int) -> None:
        """Wait no longer for a reply."""
        self._waiting.pop(number, None)
        if self._retired and not self._waiting:
            self.close()

    async def call(self, key: str, link: str, frames: wire.Frames) -> wire.Frames:
        """Send a request and return the frames of its reply, which are read-only.

        `NoSuchKey` if the other end does not serve the key; `RemoteError` if the handler raised an
        exception; `Lost` if the connection ended, so that the request may have been carried out.
        """
        number = next(self._requests)
        reply: asyncio.Future[wire.Frames] = self._loop.create_future()
        self._waiting[number] = reply
        message: _Outgoing | None = None
        try:
            places = await self._places(frames)
            message = self._sent(Kind.REQUEST, number, Description(key, link), frames, places)
            del places
            return await reply
        except asyncio.CancelledError:
            if message is not None:
                self._give_up(message)
            raise
        finally:
            if reply.done() and not reply.cancelled():
                reply.exception()  # asyncio would log one that came too late to be raised
            self.forget(number)

    async def is_alive(self, within: float) -> bool:
        """Return whether the other end answers, or receives some of a large message, in time."""
        received, sent = self._received_bytes, self._sent_bytes
        try:
            async with asyncio.timeout(within):
                await self.call(NO_KEY, "", [])
        except (Lost, TimeoutError):
            return self._received_bytes > received or self._sent_bytes - sent > JOIN_BYTES
        except NoSuchKey:
            pass
        return True

    def retire(self) -> None:
        """Close it once no request that was made here waits for its reply."""
        self._retired = True
        if not self._waiting:
            self.close()

    def close(self, why: str = "closed here", avoid: bool = False) -> None:
        """Close it: pending calls raise `Lost`."""
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._fd)
        self._want_to_write(False)
        if self._news is not None:
            self._news.cancel()
        self._line.close()
        self._queue.clear()
        self._loans.spoil()
        waiting, self._waiting = self._waiting, {}
        self._on_lost(self, why, avoid)
        for reply in waiting.values():
            if not reply.done():
                reply.set_exception(Lost(why))

    # -- sending -------------------------------------------------------------------------------

    def _needs_place(self, frame: np.ndarray) -> bool:
        return self._pool is not None and frame.nbytes >= LARGE_BYTES

    async def _places(self, frames: wire.Frames) -> list[Place | None]:
        """Put large frames into segments; return the segment and offset of each that is in one."""
        places: list[Place | None] = [None] * len(frames)
        if self._pool is None:
            return places
        to_copy: list[int] = []
        lying: set[int] = set()
        for index, frame in enumerate(frames):
            if self._needs_place(frame):
                own = memory.held_by(frame) if frame.flags.c_contiguous else None
                # One descriptor is for the copies.
                if own is None or own.mapping.fd < 0 or len(lying) == MAX_DESCRIPTORS - 1:
                    to_copy.append(index)
                else:
                    start = frame.__array_interface__["data"][0] - own.mapping.address
                    places[index] = own, start
                    lying.add(id(own))
        if to_copy:
            filled = partial(self._pool.filled, [frames[index] for index in to_copy])
            size = sum(frames[index].nbytes for index in to_copy)
            try:
                if size < INLINE_BYTES:
                    held, starts = filled()
                else:  # shielded, because a thread cannot be stopped, and keeps the segment
                    held, starts = await asyncio.shield(offload(filled, size))
            except OSError as error:
                self._pool.complain(error)
                return places
            for index, start in zip(to_copy, starts, strict=True):
                places[index] = held, start
        return places

    def _sent(
        self,
        kind: Kind,
        number: int,
        about: Description,
        frames: Sequence[np.ndarray] = (),
        places: Sequence[Place | None] = (),
    ) -> _Outgoing:
        """Queue a message, and send as much as possible at once."""
        if self.lost:
            raise Lost("the connection is lost")
        about.frames = [described(frame) for frame in frames]  # raises before any is lent
        new = self._loans.lend(about, places)
        inline = [  # a contiguous frame is not copied
            np.ascontiguousarray(frame).reshape(-1).view(np.uint8).data
            for frame, place in zip(frames, places, strict=True)
            if place is None and frame.nbytes
        ]
        head = packed(kind, number, about)
        if inline and sum(map(len, inline)) <= JOIN_BYTES:
            head, inline = b"".join([head, *inline]), []
        message = _Outgoing([memoryview(head), *inline], new)
        self._queue.append(message)
        if not self._writing:
            self._flush()
        return message

    def _flush(self) -> None:
        """Send as much as the socket takes."""
        sent = 0
        try:
            while self._queue and sent < BUDGET_BYTES:
                message = self._queue[0]
                message.begun = True  # TLS may have taken some of it even if it reports otherwise
                done = self._line.send(message.buffers[:PARTS], message.descriptors)
                sent += done
                self._sent_bytes += done
                message.advance(done)
                if not message.buffers:
                    self._queue.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(str(error))
            return
        self._want_to_write(bool(self._queue))

    def _want_to_write(self, wanted: bool) -> None:
        if wanted and not self._writing:
            self._loop.add_writer(self._fd, self._flush)
        elif self._writing and not wanted:
            self._loop.remove_writer(self._fd)
        self._writing = wanted

    def _give_up(self, message: _Outgoing) -> None:
        """Drop or copy a request whose caller has gone, and may change its arrays."""
        if not message.buffers:
            return
        if not message.begun and not self._line.passes_memory and message in self._queue:
            self._queue.remove(message)
        else:
            # Its owner may change the rest now, and a torn message must not arrive.
            message.buffers = [memoryview(bytes(buffer)) for buffer in message.buffers]

    # -- receiving -----------------------------------------------------------------------------

    def _readable(self) -> None:
        if self.lost:
            return
        received = 0
        try:
            while received < BUDGET_BYTES:
                room = self._reader.room()
                done = self._line.receive(room)
                if not done:
                    self.close("the other end closed the connection, or ended")
                    return
                received += done
                self._received_bytes += done
                self._reader.received(done)
                while (message := self._reader.take()) is not None:
                    self._take(message)
                    del message  # so that nothing is held until the next one comes
                    if self.lost:
                        return
                if done < len(room) and self._reader.is_between:
                    break  # usually there is nothing more; otherwise the event loop calls again
        except BlockingIOError:
            return
        except OSError as error:
            self.close(str(error))
        except MemoryError as error:
            self.close(f"no memory for a received message: {error}")
        except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            self.close(f"received bytes are not a message of dps: {error!r}")
        else:
            if self._line.has_more:
                self._loop.call_soon(self._readable)

    def _take(self, message: Message) -> None:
        about = message.about
        self._loans.note(about)
        try:
            self._loans.accept(message, self._line)
        except OSError as error:
            self._sent(Kind.NO_MEMORY, 0, Description(f"cannot map memory: {error}"))
            self.close(f"cannot map shared memory: {error}", avoid=True)
            return
        if about.loans and self._news is None:
            self._news = self._loop.call_later(NEWS_SECONDS, self._send_news)
        frames = [frame for frame in message.frames if frame is not None]
        message.frames.clear()
        if message.kind is Kind.REQUEST:
            handler = self._handlers.get(about.text)
            if handler is None:
                self._sent(Kind.NOBODY, message.number, Description(about.text))
            else:
                self._carry_out(message.number, handler, about.link, frames)
            return
        if message.kind is Kind.NO_MEMORY:
            self.close(about.text, avoid=True)
        waiting = self._waiting.get(message.number)
        if waiting is None or waiting.done():
            return  # its caller has given up
        match message.kind:
            case Kind.REPLY:
                waiting.set_result(frames)
            case Kind.NOBODY:
                waiting.set_exception(NoSuchKey(about.text))
            case Kind.FAILED:
                waiting.set_exception(RemoteError(about.text))

    def _carry_out(self, number: int, handler: Handler, link: str, frames: wire.Frames) -> None:
        """Begin to carry out a request; send its reply now, if that needs no wait."""
        try:
            begun = handler(link, *frames)
            frames.clear()
            if isinstance(begun, list) and not any(map(self._needs_place, begun)):
                self._sent(Kind.REPLY, number, Description(), begun, [None] * len(begun))
                return
        except Exception as error:  # noqa: BLE001 - the caller gets any error
            self._failed(number, error)
        else:
            self._replies.start(self._reply(number, begun))

    async def _reply(
        self, number: int, begun: wire.Frames | Coroutine[Any, Any, wire.Frames]
    ) -> None:
        try:
            reply = begun if isinstance(begun, list) else await begun
            places = await self._places(reply)
            if not self.lost:
                self._sent(Kind.REPLY, number, Description(), reply, places)
        except Exception as error:  # noqa: BLE001 - the caller gets any error
            self._failed(number, error)

    def _failed(self, number: int, error: Exception) -> None:
        text = log_failure(error)
        if not self.lost:
            self._sent(Kind.FAILED, number, Description(text))

    def _send_news(self) -> None:
        """Report the ends of loans, if no other message has; repeat while there are loans."""
        self._news = None
        if self.lost:
            return
        if self._loans.ended or self._loans.retired:
            self._sent(Kind.NOTE, 0, Description())
        if self._loans.borrowed:
            self._news = self._loop.call_later(NEWS_SECONDS, self._send_news)


class _Loans:
    """The segments that each end of a connection has from the other."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._lent: dict[int, Held] = {}
        # Segments that the other end knows, and their numbers there.
        self._shown: weakref.WeakKeyDictionary[memory.Mapping, int] = weakref.WeakKeyDictionary()
        self.retired: deque[int] = deque()
        self._known: dict[int, memory.Mapping] = {}
        self.ended: deque[int] = deque()
        self.borrowed = 0  # loans that are held here, or ended but were not reported yet

    def lend(self, about: Description, places: Sequence[Place | None]) -> list[int]:
        """Describe loans in `about`; return the descriptors to be sent along."""
        descriptors: list[int] = []
        loans: dict[int, int] = {}
        for index, place in enumerate(places):
            if place is None:
                continue
            held, start = place
            if id(held) not in loans:
                loan = next(self._numbers)
                self._lent[loan] = held
                loans[id(held)] = len(about.loans)
                mapping = held.mapping
                if mapping not in self._shown:
                    number = self._shown[mapping] = next(self._numbers)
                    weakref.finalize(mapping, self.retired.append, number).atexit = False
                    about.segments.append((number, mapping.size))
                    descriptors.append(mapping.fd)
                about.loans.append((loan, self._shown[mapping]))
            about.frames[index] = (*about.frames[index][:2], loans[id(held)], start)
        # Other threads may add to these at the same time.
        about.ended += [self.ended.popleft() for _ in range(len(self.ended))]
        about.retired += [self.retired.popleft() for _ in range(len(self.retired))]
        self.borrowed -= len(about.ended)
        return descriptors

    def note(self, about: Description) -> None:
        """Take note of ended loans, and of segments of the other end that are gone."""
        for number in about.ended:
            held = self._lent.pop(abs(number))
            held.spoiled |= number < 0
        for number in about.retired:
            self._known.pop(number, None)

    def accept(self, message: Message, line: Line) -> None:
        """Map the segments of a message, and make its arrays; `OSError` if that is impossible."""
        about = message.about
        for number, size in about.segments:
            if line.truncated or not line.descriptors:
                raise OSError("no file descriptors are left")
            fd = line.descriptors.popleft()
            mapping = self._known[number] = memory.opened(fd, size)
            if memory.few_left(fd):  # otherwise it is kept, to pass the segment on
                os.close(fd)
                mapping.fd = -1
        whole = []
        for loan, number in about.loans:
            segment = self._known[number]
            end = partial(_note_end, self.ended, loan)  # without a reference to this
            held = Held(segment, (segment.size,), np.dtype(np.uint8), False, end)
            whole.append(np.asarray(held))
            self.borrowed += 1
        for index, (name, shape, place, start) in enumerate(about.frames):
            if place != INLINE:
                dtype = dtype_of(name)
                stop = start + prod(shape) * dtype.itemsize
                if not 0 <= start <= stop <= whole[place].size:
                    raise ValueError("a frame that is not in its segment")
                message.frames[index] = whole[place][start:stop].view(dtype).reshape(shape)

    def spoil(self) -> None:
        """Never fill lent segments again: the connection is lost, so their use is unknown."""
        for held in self._lent.values():
            held.spoiled = True
        self._lent.clear()
        self._known.clear()
        self._shown.clear()


def _note_end(ended: deque[int], loan: int, mapping: memory.Mapping, spoiled: bool) -> None:
    ended.append(-loan if spoiled else loan)
