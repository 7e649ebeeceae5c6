"""Blocking code on virtual time: functions that give way to the loop whenever they wait.

Each runs in a greenlet of its own, in the one thread that there is. What it waits for, such as a
`VirtualFuture` or a `VirtualFlag`, has the loop go on until that has happened; the program's own
code, outside of all functions, has the loop run meanwhile. So the order in which things happen
follows from the program alone.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import Context, copy_context
from typing import Any, SupportsIndex, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

from dps.errors import ConfigurationError
from dps.virtual.loop import Process, VirtualLoop

T = TypeVar("T")

GARBAGE = 2_000_000  # objects that were made and not let go of, until the collector looks
REAL_SLEEP = time.sleep

Wake = Callable[..., None]
Subscribe = Callable[[Wake], object]


class BlockingLoop(VirtualLoop):
    """A virtual loop that can be waited on, by blocking functions and from outside of it.

    Attributes
    ----------
    files
        Says how long files take that a piece of work has read and written: called before the work,
        it returns what is called after it.
    probe
        Says whether nobody listens at a host and port; it takes as long as that does.
    """

    files: Callable[[], Callable[[], float]]
    probe: Callable[[str, int], Coroutine[Any, Any, bool]]

    def wait(self, subscribe: Subscribe, timeout: float | None = None) -> None:
        """Return when something has happened, or after `timeout` virtual seconds.

        Parameters
        ----------
        subscribe
            Is given what is to be called when it has happened.
        """
        current = getcurrent()
        if isinstance(current, VirtualThread):
            current.give_way(subscribe, timeout)
            return
        happened = self.create_future()

        def wake(*_: object) -> None:
            if not happened.done():
                happened.set_result(None)

        subscribe(wake)
        timer = None if timeout is None else self.call_later(timeout, wake)
        self.drive(happened)
        if timer is not None:
            timer.cancel()

    def drive(self, future: asyncio.Future[T]) -> T:
        """Let the time pass until something is done.

        Meanwhile the garbage collector looks less often: what a simulation makes is soon let go of,
        and looking at what stays took a quarter of the time.
        """
        garbage = gc.get_threshold()
        time.sleep = _sleep
        gc.set_threshold(max(GARBAGE, garbage[0]), *garbage[1:])
        try:
            return self.run_until_complete(future)
        finally:
            gc.set_threshold(*garbage)
            time.sleep = REAL_SLEEP

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run the work inline; it is over when what it has read and written would be."""
        over: asyncio.Future[T] = self.create_future()

        def measured() -> float:
            takes = self.files()
            results.append(func(*args))
            return takes()

        results: list[T] = []
        working = super().run_in_executor(executor, measured)

        def end(_: object) -> None:
            if over.done():
                return
            if working.cancelled():
                over.cancel()
            elif (error := working.exception()) is not None:
                over.set_exception(error)
            elif takes := working.result():
                self.call_later(takes, finish)
            else:
                finish()

        def finish() -> None:
            if not over.done():
                over.set_result(results[0])

        working.add_done_callback(end)
        over.add_done_callback(lambda _: working.cancel())
        return over

    async def create_connection(  # type: ignore[override]
        self, factory: Any, host: str, port: int, **_: Any
    ) -> Any:
        """Find out whether somebody listens; nothing is sent by such connections."""
        if await self.probe(host, port):
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        return _Unused(), factory()


def _sleep(seconds: float | SupportsIndex) -> None:
    """What `time.sleep` is while virtual time passes."""
    if isinstance(getcurrent(), VirtualThread):
        raise ConfigurationError(
            f"time.sleep({seconds}) on virtual time would hold everything up, and no time "
            "would pass: a training function waits by worker.sleep(seconds)"
        )
    REAL_SLEEP(seconds)


class _Unused(asyncio.Transport):
    """The end of a connection that is closed at once."""

    def close(self) -> None:
        """There is nothing to close."""

    def is_closing(self) -> bool:
        """It is always closed."""
        return True


class VirtualFuture(Future[T]):
    """A future that can be waited for on virtual time, also by `await`."""

    def __init__(self, loop: BlockingLoop) -> None:
        super().__init__()
        self.loop = loop

    def result(self, timeout: float | None = None) -> T:
        """Return the result once there is one; `TimeoutError` after `timeout` virtual seconds."""
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error once it is done; `TimeoutError` after `timeout` virtual seconds."""
        self._wait(timeout)
        return super().exception(0)

    def __await__(self) -> Any:
        return asyncio.wrap_future(self, loop=self.loop).__await__()

    def _wait(self, timeout: float | None) -> None:
        if not self.done():
            self.loop.wait(self.add_done_callback, timeout)


def begin(request: Coroutine[Any, Any, T], loop: BlockingLoop) -> VirtualFuture[T]:
    """Have the loop do something, in the process of whoever asks."""
    current = getcurrent()
    if isinstance(current, VirtualThread) and current.killed:
        request.close()
        raise GreenletExit
    future: VirtualFuture[T] = VirtualFuture(loop)
    task = loop.create_task(request)

    def take_over(done: asyncio.Task[T]) -> None:
        if future.cancelled():
            return
        if done.cancelled():
            future.cancel()
        elif (error := done.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())

    task.add_done_callback(take_over)
    return future


class VirtualThread(greenlet):
    """A function that runs as if in a thread of a process; it begins at once.

    Attributes
    ----------
    future
        What it returns or raises; cancelled if it was killed.
    killed
        Whether its process was killed: nothing that it does on its way out has any effect.
    """

    def __init__(
        self, work: Callable[[], Any], loop: BlockingLoop, process: Process | None = None
    ) -> None:
        super().__init__()
        self.future: VirtualFuture[Any] = VirtualFuture(loop)
        self.killed = False
        self._work = work
        self._loop = loop
        own = copy_context() if process is None else process.do(copy_context)
        self.gr_context = own
        # It goes on by calls of its process, which wait while that is paused.
        self._context: Context = own.copy()
        self._turn: object = None
        loop.call_soon(self._go_on, context=self._context)

    def run(self) -> None:
        """Run the function; called by greenlet."""
        try:
            result = self._work()
        except GreenletExit:
            self.future.cancel()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the result
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def give_way(self, subscribe: Subscribe, timeout: float | None = None) -> None:
        """Let others run until something has happened, or for so many seconds."""
        self._must_live()
        turn = self._turn = object()

        def wake(*_: object) -> None:
            if self._turn is turn:
                self._turn = None
                self._loop.call_soon(self._go_on, context=self._context)

        subscribe(wake)
        timer = None
        if timeout is not None:
            timer = self._loop.call_later(timeout, wake, context=self._context)
        assert self.parent is not None
        self.parent.switch()
        if timer is not None:
            timer.cancel()
        self._must_live()

    def join(self) -> None:
        """Wait until it has ended."""
        self.future.exception()

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not self.future.done()

    def kill(self) -> None:
        """End it where it is, soon: its process is gone."""
        if not self.killed:
            self.killed = True
            self._turn = None
            self._loop.call_soon(self._end, context=copy_context())

    def _go_on(self) -> None:
        if not self.dead and not self.killed:
            self.parent = getcurrent()
            self.switch()

    def _end(self) -> None:
        if not self.dead:
            self.parent = getcurrent()
            self.throw(GreenletExit)
        if not self.future.done():  # it had not begun
            self.future.cancel()

    def _must_live(self) -> None:
        if self.killed:
            raise GreenletExit


class VirtualFlag:
    """Something to wait for on virtual time, as `threading.Event` is."""

    def __init__(self, loop: BlockingLoop) -> None:
        self._loop = loop
        self._set = False
        self._waiting: list[Wake] = []

    def set(self) -> None:
        """Have whoever waits go on."""
        self._set = True
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for `timeout` virtual seconds at most; return whether it is."""
        if not self._set:
            self._loop.wait(self._waiting.append, timeout)
        return self._set
