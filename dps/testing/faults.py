"""Faults as a test writes them down: those of `dps.core.faults.plan`, with their moment in words.

Each function is named after the fault that it makes. A target is the name of a node ("server-0" or
"worker-3"), several names, or a place such as `dps.core.faults.plan.InChain(0, "tail")`. The moment
is said by one argument: `at_updates` (as soon as the shards have applied so many updates),
`at_seconds` (after the first worker began), or `when`, any other of that module.
"""

from __future__ import annotations

from dps.core.faults import plan
from dps.core.faults.plan import AtSeconds, AtUpdates, Direction, Target, When
from dps.errors import ConfigurationError


def Kill(  # noqa: N802 - it stands for the class
    target: Target,
    when: When | None = None,
    *,
    at_updates: int | None = None,
    at_seconds: float | None = None,
    back_after: float | None = 1.0,
) -> plan.Kill:
    """Kill the process of a node; a fresh one takes its place after so many seconds, or none."""
    return plan.Kill(target, _moment(when, at_updates, at_seconds), back_after)


def Pause(  # noqa: N802 - it stands for the class
    target: Target,
    when: When | None = None,
    *,
    at_updates: int | None = None,
    at_seconds: float | None = None,
    seconds: float = 2.0,
) -> plan.Pause:
    """Stop the process of a node for so many seconds; it then goes on where it was."""
    return plan.Pause(target, _moment(when, at_updates, at_seconds), seconds)


def Slow(  # noqa: N802 - it stands for the class
    target: Target,
    when: When | None = None,
    *,
    at_updates: int | None = None,
    at_seconds: float | None = None,
    factor: float = 4.0,
    seconds: float = 2.0,
) -> plan.Slow:
    """Stop a process and let it go on in turns, so that it has one `factor`th of the time.

    A function that waits meanwhile, as by `worker.sleep`, does not wait for longer.
    """
    return plan.Slow(target, _moment(when, at_updates, at_seconds), factor, seconds)


def Cut(  # noqa: N802 - it stands for the class
    target: Target,
    when: When | None = None,
    *,
    at_updates: int | None = None,
    at_seconds: float | None = None,
    seconds: float = 2.0,
    direction: Direction = "both",
) -> plan.Cut:
    """Let nothing of the parameter server pass to a node ("in"), from it ("out"), or "both"."""
    return plan.Cut(target, _moment(when, at_updates, at_seconds), seconds, direction)


def Delay(  # noqa: N802 - it stands for the class
    target: Target,
    when: When | None = None,
    *,
    at_updates: int | None = None,
    at_seconds: float | None = None,
    delay: float = 0.05,
    seconds: float = 2.0,
) -> plan.Delay:
    """Have every message to and from a node take `delay` seconds longer."""
    return plan.Delay(target, _moment(when, at_updates, at_seconds), delay, seconds)


def _moment(when: When | None, at_updates: int | None, at_seconds: float | None) -> When:
    given: list[When] = [] if when is None else [when]
    if at_updates is not None:
        given.append(AtUpdates(at_updates))
    if at_seconds is not None:
        given.append(AtSeconds(at_seconds))
    if len(given) != 1:
        raise ConfigurationError(
            f"{len(given)} moments are given for a fault, expected one: at_updates, at_seconds or "
            "when"
        )
    return given[0]
