"""Blocking code on virtual time: functions that yield to the loop whenever they wait.

Each runs in a separate greenlet of one thread. While it waits for a `VirtualFuture`, the
loop continues; while the program waits outside of all such functions, it runs the loop.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, SupportsIndex, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

from dps.errors import ConfigurationError
from dps.virtual.loop import Process, VirtualLoop

T = TypeVar("T")

GARBAGE = 2_000_000  # objects made and not yet freed, after which the collector runs
REAL_SLEEP = time.sleep

Wake = Callable[..., None]
Subscribe = Callable[[Wake], object]


class BlockingLoop(VirtualLoop):
    """A virtual loop that can be waited on, by blocking functions and from outside of it."""

    # Whether no process listens at a host and port, after the time that this takes.
    probe: Callable[[str, int], Coroutine[Any, Any, bool]]

    def wait(self, subscribe: Subscribe, timeout: float | None = None) -> None:
        """Return when an event has occurred, or after `timeout` virtual seconds.

        `subscribe` is called with a function, which is to be called when the event occurs.
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
        """Let time pass until a future is done; return its result."""
        # During this, the garbage collector runs less often: most objects of a simulation are freed
        # soon without it, and scanning the others took a quarter of the time.
        garbage = gc.get_threshold()
        time.sleep = _sleep
        gc.set_threshold(max(GARBAGE, garbage[0]), *garbage[1:])
        try:
            return self.run_until_complete(future)
        finally:
            gc.set_threshold(*garbage)
            time.sleep = REAL_SLEEP

    async def create_connection(  # type: ignore[override]
        self, factory: Any, host: str, port: int, **_: Any
    ) -> Any:
        """Find out whether a process listens, by an error, as there are no sockets."""
        if await self.probe(host, port):
            raise ConnectionRefusedError(f"no process listens at {host}:{port}")
        raise OSError(
            f"{host}:{port} belongs to a virtual process; only virtual processes can connect"
        )


def _sleep(seconds: float | SupportsIndex) -> None:
    if isinstance(getcurrent(), VirtualThread):
        raise ConfigurationError(
            f"time.sleep({seconds}) would block virtual time; call worker.sleep(seconds) in the "
            "training function"
        )
    REAL_SLEEP(seconds)


class VirtualFuture(Future[T]):
    """A future that can be waited for on virtual time, also by `await`."""

    def __init__(self, loop: BlockingLoop) -> None:
        super().__init__()
        self.loop = loop

    def result(self, timeout: float | None = None) -> T:
        """Return the result once there is one; `TimeoutError` after `timeout` virtual seconds."""
        self.wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error once it is done; `TimeoutError` after `timeout` virtual seconds."""
        self.wait(timeout)
        return super().exception(0)

    def __await__(self) -> Any:
        return asyncio.wrap_future(self, loop=self.loop).__await__()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done, for `timeout` virtual seconds at most; return whether it is."""
        if not self.done():
            self.loop.wait(self.add_done_callback, timeout)
        return self.done()


class VirtualFlag(VirtualFuture[None]):
    """A flag to wait for, as `threading.Event`."""

    is_set = Future.done

    def set(self) -> None:
        """Wake all waiters."""
        if not self.done():
            self.set_result(None)


class VirtualThread(greenlet):
    """A function that runs as if in a thread of a process; it starts at once."""

    def __init__(self, work: Callable[[], Any], loop: BlockingLoop, process: Process) -> None:
        super().__init__()
        # Gets the result or the error, and is cancelled if the function was killed.
        self.future: VirtualFuture[Any] = VirtualFuture(loop)
        self.killed = False  # if so, it has no effect while it ends
        self._work = work
        self._loop = loop
        self.gr_context = process.context.copy()
        # It is resumed by calls of its process, which wait while the process is paused.
        self._context = process.context.copy()
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
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def give_way(self, subscribe: Subscribe, timeout: float | None) -> None:
        """Let others run (see `BlockingLoop.wait`)."""
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
        """Make it end soon, at any point: its process is gone."""
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
