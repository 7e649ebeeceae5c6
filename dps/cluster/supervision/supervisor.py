"""The supervisor of a program: it starts it again when its driver or its scheduler is lost.

It is small, and does not import Dask: it shares nothing with what may fail but a pipe.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from signal import Signals
from typing import Any, TypeVar

from dps.cluster.backends.processes import without_interrupts
from dps.cluster.supervision.incarnation import Incarnation
from dps.cluster.supervision.messages import ClusterLost, Finished, Known, Past, Raised, Seen, Up
from dps.core.arguments import check_function
from dps.core.ranges import argument_above_zero, refused, whole_argument
from dps.errors import ProgramFailed, ReturnedWarning, TooManyReturns
from dps.events import Returned, log

T = TypeVar("T")

EXIT_SECONDS = 10.0


def supervise(
    program: Callable[[Any], T],
    *,
    returns: int = 5,
    within: float = 600.0,
    on_return: Callable[[Returned], None] | None = None,
    standby: bool = False,
    preload: Sequence[str] | None = None,
) -> T:
    """Run a program, and start it again by itself when its driver or its scheduler is lost.

    Parameters
    ----------
    program
        Called with a `Session` in a process of its own, which is the driver: it makes a Dask client
        and calls `Session.parameter_server`. A function of a module, or a `functools.partial` of
        one, as for `multiprocessing`.
    returns, within
        It is started again at most so many times within so many seconds.
    on_return
        Called here with a `Returned` for each parameter server that is up again. What it raises
        does not end the program: it is raised when that has returned.
    standby
        Whether the process that a return needs is kept ready, with Dask imported. A return is
        faster then, and some 100 MB of memory are in use for it.
    preload
        What the program's `LocalCluster` is given as its `preload`, if it has one, so that the
        process that nodes are forked from starts beside the program's own, and is kept ready as
        well; as much memory again. None: it starts with the cluster.

    Returns
    -------
    result
        What the program returned.

    Raises
    ------
    TooManyReturns
        It would have had to be started again more often.
    ProgramFailed
        Its process has exited by itself, or what it returned or raised cannot be sent.
    Exception
        Whatever the program raises, with its traceback; it is not started again then.
    ExceptionGroup
        The program has returned, and `on_return` has raised these.
    DeadlineExceeded
        Processes of the program cannot be ended, so it cannot be started again.

    Notes
    -----
    It is started again when its process is ended by a signal, and when the connection to Dask's
    scheduler breaks while a parameter server is open, or comes up; after that, also when it finds
    no cluster. Whatever else is of its session on this machine is ended before, but not what the
    program has started with a session of its own (`start_new_session=True`). The program begins at
    its beginning; parameter servers go on from their newest complete checkpoints, and `Worker.done`
    tells training functions where. Each return is a `ReturnedWarning`, a `Returned` event and a
    line in the log. The warning is never raised, whatever the filter for warnings says.
    """
    check_function("program", program, ["session"])
    whole_argument("returns", returns, 0, "returns")
    argument_above_zero("within", within)
    if on_return is not None:
        check_function("on_return", on_return, ["returned"])
    if preload is not None and not (
        isinstance(preload, list | tuple) and all(isinstance(each, str) for each in preload)
    ):
        raise refused("preload", preload, "a list of names of modules")
    start = partial(Incarnation, program, preload)
    found: T = _Supervisor(start, _Limit(returns, within), on_return, standby).run()
    return found


@dataclass(slots=True)
class _Limit:
    """How often a program may be started again within a time."""

    most: int
    within: float
    _times: deque[float] = field(default_factory=deque)

    def allows(self, now: float) -> bool:
        """Whether once more is within the limit; it is counted."""
        self._times.append(now)
        while self._times[0] <= now - self.within:
            self._times.popleft()
        return len(self._times) <= self.most

    def __str__(self) -> str:
        return f"{self.most} returns within {self.within:g} s"


class _Supervisor:
    def __init__(
        self,
        start: Callable[[], Incarnation],
        limit: _Limit,
        on_return: Callable[[Returned], None] | None,
        standby: bool,
    ) -> None:
        self._start = start
        self._limit = limit
        self._on_return = on_return
        self._standby = standby
        self._past = Past()
        self._current: Incarnation | None = None
        self._next: Incarnation | None = None
        self._untold: list[Exception] = []  # what on_return has raised

    def run(self) -> Any:
        """Return what the program returns in the end."""
        try:
            # An interrupt waits until what was started is known, or nobody would end it.
            with without_interrupts():
                self._current = current = self._start()
            while True:
                current.begin(self._past)
                if self._standby:
                    self._start_next()
                last = self._follow(current)
                if isinstance(last, Finished | Raised):
                    current.join(EXIT_SECONDS)
                    break
                current = self._replaced(current, last)
        except KeyboardInterrupt:
            if self._current is not None:
                self._current.interrupt()
            raise
        finally:
            with ExitStack() as ends:  # also of the second, if the first cannot be ended
                for each in (self._current, self._next):
                    if each is not None:
                        ends.callback(each.end)
        return self._result_of(last)

    def _start_next(self) -> Incarnation:
        with without_interrupts():
            self._next = self._start()
        return self._next

    def _follow(self, incarnation: Incarnation) -> Finished | Raised | ClusterLost | None:
        """Take note of what an incarnation says, to its last word; None: it has died."""
        while True:
            match incarnation.said():
                case Up(call, folder, returned):
                    self._past.known[call] = Known(folder)
                    if returned is not None:
                        self._tell(returned)
                case Seen(call, versions, contained):
                    known = self._past.known[call]
                    self._past.known[call] = replace(known, versions=versions, contained=contained)
                case last:
                    return last

    def _replaced(self, incarnation: Incarnation, last: ClusterLost | None) -> Incarnation:
        """End an incarnation, and return the next one, which has not begun."""
        noticed = time.monotonic()
        cause = _cause(incarnation, last)
        if not self._limit.allows(noticed):
            met = last.raised if last is not None else None
            error = _error_of(met) if met is not None else None
            raise TooManyReturns(self._limit_text(cause)) from error
        following = self._next or self._start_next()  # which imports what it needs meanwhile
        incarnation.end()
        returns = self._past.returns + 1
        self._past = replace(self._past, returns=returns, cause=cause, noticed=noticed)
        self._current = following
        self._next = None
        return following

    def _limit_text(self, cause: str) -> str:
        folders = ", ".join(known.folder for known in self._past.known.values())
        where = f"ParameterServer.resume goes on from {folders}" if folders else "nothing was up"
        return f"{cause}, and it is not started again after {self._limit}; {where}"

    def _tell(self, returned: Returned) -> None:
        log(returned, {})
        text = f"dps: {returned} (return {returned.returns}; the limit is {self._limit})"
        # A filter that makes errors of warnings would end the training that has just come back.
        with suppress(ReturnedWarning):
            warnings.warn(text, ReturnedWarning, stacklevel=5)
        if self._on_return is not None:
            try:
                self._on_return(returned)
            except Exception as error:  # noqa: BLE001 (raised when the program has ended)
                self._untold.append(error)

    def _result_of(self, last: Finished | Raised) -> Any:
        if isinstance(last, Raised):
            error = _error_of(last)
            for each in self._untold:
                error.add_note(f"on_return has raised as well: {each!r}")
            raise error
        if self._untold:
            raise ExceptionGroup("on_return has raised; the program has returned", self._untold)
        return last.result


def _cause(incarnation: Incarnation, last: ClusterLost | None) -> str:
    """What an incarnation ended by; raises `ProgramFailed` if it is not to be started again."""
    if last is not None:
        return last.cause
    code = incarnation.exit_code
    if code < 0:
        return f"the driver's process was ended by {_name(-code)}"
    raise ProgramFailed(
        f"the program's process exited with code {code} before the program returned: look at what "
        "it printed. It must be a function of a module that can be imported, as for multiprocessing"
    )


def _name(signal: int) -> str:
    try:
        return Signals(signal).name
    except ValueError:
        return f"signal {signal}"


def _error_of(raised: Raised) -> BaseException:
    """What a program has raised, with its traceback there."""
    if raised.error is None:
        return ProgramFailed(f"what the program returned or raised cannot be sent:\n{raised.trace}")
    raised.error.__cause__ = ProgramFailed(f"in the program:\n{raised.trace}")
    return raised.error
