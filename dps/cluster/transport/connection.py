"""Requests and replies over one connection: many under way at once, large frames not copied.

On a unix socket arrays travel in segments of memory (`dps.cluster.transport.memory`), which the
receiver gets as a loan: it lasts as long as anybody there holds a view of it, and the sender is
told of its end with the next message. When a connection is lost nobody can be asked any more what
is held: the segments on loan are then never filled again.

Nothing that comes is unpickled, nor can it name code.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count

import numpy as np

from dps.cluster.transport import memory
from dps.cluster.transport.framing import (
    INLINE,
    Description,
    Kind,
    Message,
    Reader,
    as_described,
    described,
    flat,
    nbytes,
    packed,
)
from dps.cluster.transport.memory import Held, Pool
from dps.cluster.transport.sockets import MOST_DESCRIPTORS, Line
from dps.errors import RemoteError
from dps.protocol import wire
from dps.protocol.executor import INLINE_BYTES, offload
from dps.protocol.tasks import Tasks

LARGE_BYTES = 1 << 16  # of a frame from which on a segment costs less than the socket
JOIN_BYTES = 1 << 14  # of a whole message that is better copied than sent in parts
BUDGET_BYTES = 4 << 20  # received or sent before the event loop has its turn
PARTS = 64
NO_KEY = ""  # no service has it, so a request for it is refused at once
NEWS_SECONDS = 0.5  # later than this the end of a loan is told by a message of its own

Handler = Callable[..., Awaitable[wire.Frames]]

_log = logging.getLogger("dps.transport")


class Lost(ConnectionError):
    """The connection ended before the reply came."""


class NoSuchKey(LookupError):
    """Nothing at the other end has the key that was asked for."""


class _Outgoing:
    """A message that is being sent: `begun` says that some of it may be on its way."""

    __slots__ = ("begun", "buffers", "descriptors")

    def __init__(self, buffers: list[memoryview], descriptors: Sequence[int]) -> None:
        self.buffers = buffers
        self.descriptors = descriptors
        self.begun = False

    def advance(self, sent: int) -> None:
        self.descriptors = ()
        while self.buffers and sent >= len(self.buffers[0]):
            sent -= len(self.buffers.pop(0))
        if sent:
            self.buffers[0] = self.buffers[0][sent:]

    def make_own(self) -> None:
        """Copy what is left: its owner may change it now, and a torn message must not arrive."""
        self.buffers = [memoryview(bytes(buffer)) for buffer in self.buffers]


class Connection:
    """One end of a connection between two processes. Used from its event loop.

    Parameters
    ----------
    handlers
        Key → what carries out a request here: called with the link and the frames.
    pool
        Where segments for large frames come from; None: they go through the socket.
    on_lost
        Called once with this connection, and why, and whether that was for want of memory here
        or there.

    Attributes
    ----------
    lost
        Whether it is of no use any more.
    """

    def __init__(
        self,
        line: Line,
        handlers: Mapping[str, Handler],
        pool: Pool | None,
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
        self._waiting: dict[int, asyncio.Future[wire.Frames]] = {}
        self._replies = Tasks(lambda error: self._lose(f"a reply could not be sent: {error}"))
        self._loans = _Loans()
        self._news: asyncio.TimerHandle | None = None
        self._received = self._bytes_sent = 0
        self.lost = False
        self._retired = False
        self._loop.add_reader(self._fd, self._readable)

    async def call(self, key: str, link: str, frames: wire.Frames) -> wire.Frames:
        """Send a request and return the frames of its reply, which are read-only.

        Raises
        ------
        NoSuchKey
            There is no such key at the other end.
        Lost
            The connection ended. The request may have been carried out.
        RemoteError
            Carrying it out raised something that is no reply.
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
            self._waiting.pop(number, None)
            if reply.done() and not reply.cancelled():
                reply.exception()  # asyncio would complain of one that came too late to be raised
            if self._retired and not self._waiting:
                self.close()

    async def is_alive(self, within: float) -> bool:
        """Whether the other end answers, or takes in a large message, within `seconds`."""
        received, sent = self._received, self._bytes_sent
        try:
            async with asyncio.timeout(within):
                await self.call(NO_KEY, "", [])
        except (Lost, TimeoutError):
            return self._received > received or self._bytes_sent - sent > JOIN_BYTES
        except NoSuchKey:
            pass
        return True

    def retire(self) -> None:
        """End it once no request that was made here waits for its reply."""
        self._retired = True
        if not self._waiting:
            self.close()

    def close(self, why: str = "closed here") -> None:
        """End it: whatever waits for a reply gets `Lost`."""
        self._lose(why)

    # -- sending -------------------------------------------------------------------------------

    async def _places(self, frames: wire.Frames) -> list[tuple[Held, int] | None]:
        """Where in memory each frame is that need not go through the socket."""
        places: list[tuple[Held, int] | None] = [None] * len(frames)
        if self._pool is None:
            return places
        to_copy: list[int] = []
        lying: set[int] = set()
        for index, frame in enumerate(frames):
            if frame.nbytes >= LARGE_BYTES:
                place = _place_of(frame)
                if place is None or len(lying) == MOST_DESCRIPTORS - 1:  # one for the copies
                    to_copy.append(index)
                else:
                    places[index] = place
                    lying.add(id(place[0]))
        if to_copy:
            arrays = [frames[index] for index in to_copy]
            try:
                held, starts = await self._filled(self._pool, arrays)
            except OSError as error:
                self._pool.complain(error)
                return places
            for index, start in zip(to_copy, starts, strict=True):
                places[index] = held, start
        return places

    async def _filled(self, pool: Pool, arrays: Sequence[np.ndarray]) -> tuple[Held, list[int]]:
        """Copy arrays into a segment; many bytes in a thread, so that others are served."""
        size = sum(array.nbytes for array in arrays)
        if size < INLINE_BYTES:
            return pool.filled(arrays)
        work = asyncio.ensure_future(offload(partial(pool.filled, arrays), size))
        # A thread cannot be stopped: whoever gives up leaves the segment to it.
        return await asyncio.shield(work)

    def _sent(
        self,
        kind: Kind,
        number: int,
        about: Description,
        frames: wire.Frames = (),  # type: ignore[assignment]
        places: Sequence[tuple[Held, int] | None] = (),
    ) -> _Outgoing:
        """Begin to send a message; what can be sent at once is."""
        if self.lost:
            raise Lost("the connection is lost")
        for frame in frames:
            described(frame, INLINE, 0)  # what is refused must not have been lent in part
        new = self._loans.described(about, frames, places)
        inline = [
            flat(frame)
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
        """Send what the socket takes."""
        sent = 0
        try:
            while self._queue and sent < BUDGET_BYTES:
                message = self._queue[0]
                message.begun = True  # TLS may have taken some of it though it says that it has not
                done = self._line.send(message.buffers[:PARTS], message.descriptors)
                sent += done
                self._bytes_sent += done
                message.advance(done)
                if not message.buffers:
                    self._queue.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(str(error))
            return
        self._want_to_write(bool(self._queue))

    def _want_to_write(self, wanted: bool) -> None:
        if wanted and not self._writing:
            self._loop.add_writer(self._fd, self._flush)
        elif self._writing and not wanted:
            self._loop.remove_writer(self._fd)
        self._writing = wanted

    def _give_up(self, message: _Outgoing) -> None:
        """Nobody waits for the reply to a request any more, and its arrays may change."""
        if not message.buffers:
            return
        if not message.begun and not self._line.passes_memory and message in self._queue:
            self._queue.remove(message)
        else:
            message.make_own()

    # -- receiving -----------------------------------------------------------------------------

    def _readable(self) -> None:
        received = 0
        try:
            while received < BUDGET_BYTES:
                room = self._reader.room()
                done = self._line.receive(room)
                if not done:
                    self._lose("the other end has closed the connection, or has ended")
                    return
                received += done
                self._received += done
                self._reader.received(done)
                while (message := self._reader.take()) is not None:
                    self._take(message)
                    del message  # so that nothing is held until the next one comes
                    if self.lost:
                        return
                if done < len(room) and self._reader.is_between:
                    break  # there is nothing more, as a rule; if there is, the loop says so
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(str(error))
            return
        except MemoryError as error:
            self._lose(f"there is no memory here for what came: {error}")
            return
        except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            self._lose(f"what came is no message of dps: {error!r}")
            return
        if self._line.has_more:
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if not self.lost:
            self._readable()

    def _take(self, message: Message) -> None:
        about = message.about
        self._loans.note(about)
        try:
            self._loans.accept(message, self._line)
        except OSError as error:
            self._sent(Kind.NO_MEMORY, 0, Description(f"it cannot map memory: {error}"))
            self._lose(f"memory cannot be mapped here: {error}", no_memory=True)
            return
        if about.loans and self._news is None:
            self._news = self._loop.call_later(NEWS_SECONDS, self._tell_news)
        frames = [frame for frame in message.frames if frame is not None]
        message.frames.clear()
        match message.kind:
            case Kind.REQUEST:
                self._carry_out(message.number, about, frames)
            case Kind.NO_MEMORY:
                self._lose(about.text, no_memory=True)
            case Kind.REPLY | Kind.NOBODY | Kind.FAILED:
                waiting = self._waiting.get(message.number)
                if waiting is not None and not waiting.done():  # else nobody waits for it
                    _answer(waiting, message.kind, about.text, frames)

    def _carry_out(self, number: int, about: Description, frames: wire.Frames) -> None:
        handler = self._handlers.get(about.text)
        if handler is None:
            self._sent(Kind.NOBODY, number, Description(about.text))
            return
        self._replies.start(self._reply(number, handler, about.link, frames))

    async def _reply(self, number: int, handler: Handler, link: str, frames: wire.Frames) -> None:
        try:
            working = handler(link, *frames)
            frames.clear()
            reply = await working
            places = await self._places(reply)
            if not self.lost:
                self._sent(Kind.REPLY, number, Description(), reply, places)
        except Exception as error:  # noqa: BLE001 - whatever it is, who asked is told
            # As text: a log that keeps the traceback would keep the arrays, and their segments.
            _log.error("a request failed:\n%s", "".join(traceback.format_exception(error)))
            if not self.lost:
                self._sent(Kind.FAILED, number, Description(f"{type(error).__name__}: {error}"))

    def _tell_news(self) -> None:
        """Say which loans have ended where no other message has; look again while there are any."""
        self._news = None
        if self.lost:
            return
        if self._loans.has_news:
            self._sent(Kind.NOTE, 0, Description())
        if self._loans.borrowed:
            self._news = self._loop.call_later(NEWS_SECONDS, self._tell_news)

    def _lose(self, why: str, no_memory: bool = False) -> None:
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
        for reply in waiting.values():
            if not reply.done():
                reply.set_exception(Lost(why))
        self._on_lost(self, why, no_memory)


def _answer(
    waiting: asyncio.Future[wire.Frames], kind: Kind, text: str, frames: wire.Frames
) -> None:
    match kind:
        case Kind.NOBODY:
            waiting.set_exception(NoSuchKey(text))
        case Kind.FAILED:
            waiting.set_exception(RemoteError(text))
        case _:
            waiting.set_result(frames)


def _place_of(frame: np.ndarray) -> tuple[Held, int] | None:
    """Where in a segment a frame lies already, if nobody can write to it there."""
    if not frame.flags.c_contiguous:
        return None
    held = memory.held_by(frame)
    if held is None or held.mapping.fd < 0:
        return None
    return held, frame.__array_interface__["data"][0] - held.mapping.address


class _Loans:
    """Which segments each end of a connection has from the other.

    Attributes
    ----------
    borrowed
        How many loans of the other end's have not been told to have ended.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._lent: dict[int, Held] = {}
        # Of segments that the other end knows: by identity, which is theirs while they live.
        self._shown: dict[int, tuple[int, weakref.ref[memory.Mapping]]] = {}
        self._retired: deque[int] = deque()
        self._known: dict[int, memory.Mapping] = {}
        self._ended: deque[int] = deque()
        self.borrowed = 0

    @property
    def has_news(self) -> bool:
        """Whether there is anything that the other end should hear of."""
        return bool(self._ended or self._retired)

    def described(
        self,
        about: Description,
        frames: wire.Frames,
        places: Sequence[tuple[Held, int] | None],
    ) -> list[int]:
        """Fill in what is said of frames and loans; return the descriptors that must be sent."""
        descriptors: list[int] = []
        loans: dict[int, int] = {}
        for frame, place in zip(frames, places, strict=True):
            if place is None:
                about.frames.append(described(frame, INLINE, 0))
                continue
            held, start = place
            if id(held) not in loans:
                loans[id(held)] = len(about.loans)
                about.loans.append((self._lend(held), self._number(held, about, descriptors)))
            about.frames.append(described(frame, loans[id(held)], start))
        about.ended += _all_of(self._ended)
        self.borrowed -= len(about.ended)
        about.retired += _all_of(self._retired)
        return descriptors

    def note(self, about: Description) -> None:
        """Take in what the other end says of loans that it had, and of segments that it has not."""
        for number in about.ended:
            held = self._lent.pop(abs(number))
            held.spoiled |= number < 0
        for number in about.retired:
            self._known.pop(number, None)

    def accept(self, message: Message, line: Line) -> None:
        """Map what has come in memory, and make arrays over it.

        Raises
        ------
        OSError
            It cannot be mapped here.
        """
        about = message.about
        for number, size in about.segments:
            if line.truncated or not line.descriptors:
                raise OSError("there are no descriptors left")
            self._known[number] = _opened(line.descriptors.popleft(), size)
        whole = []
        for loan, number in about.loans:
            segment = self._known[number]
            end = partial(_note_end, self._ended, loan)
            held = Held(segment, (segment.size,), np.dtype(np.uint8), False, end)
            whole.append(memory.array_of(held))
            self.borrowed += 1
        for index, (dtype, shape, place, start) in enumerate(about.frames):
            if place != INLINE:
                stop = start + nbytes(dtype, tuple(shape))
                if not 0 <= start <= stop <= whole[place].size:
                    raise ValueError("a frame that is not in its segment")
                data = whole[place][start:stop]
                message.frames[index] = as_described(data, dtype, tuple(shape))

    def spoil(self) -> None:
        """The connection is lost: what was lent may be looked at for ever."""
        for held in self._lent.values():
            held.spoiled = True
        self._lent.clear()
        self._known.clear()
        self._shown.clear()

    def _lend(self, held: Held) -> int:
        loan = next(self._numbers)
        self._lent[loan] = held
        return loan

    def _number(self, held: Held, about: Description, descriptors: list[int]) -> int:
        """What the other end knows a segment as; one that it does not know is introduced."""
        mapping, key = held.mapping, id(held.mapping)
        if key not in self._shown:
            number = next(self._numbers)
            over = partial(_note_over, self._shown, self._retired, key, number)
            self._shown[key] = number, weakref.ref(mapping, over)
            about.segments.append((number, mapping.size))
            descriptors.append(mapping.fd)
        return self._shown[key][0]


def _opened(fd: int, size: int) -> memory.Mapping:
    """Map a segment; its descriptor is kept, to pass it on, unless they run short."""
    mapping = memory.opened(fd, size)
    if memory.few_left(fd):
        os.close(fd)
        mapping.fd = -1
    return mapping


def _note_end(ended: deque[int], loan: int, mapping: memory.Mapping, spoiled: bool) -> None:
    ended.append(-loan if spoiled else loan)


def _note_over(
    shown: dict[int, tuple[int, weakref.ref[memory.Mapping]]],
    retired: deque[int],
    key: int,
    number: int,
    _: object,
) -> None:
    shown.pop(key, None)
    retired.append(number)


def _all_of(news: deque[int]) -> list[int]:
    """Everything in a queue that other threads add to."""
    found = []
    while news:
        found.append(news.popleft())
    return found
