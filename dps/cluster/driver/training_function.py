"""What may be run as a training function, and whether there is room for it: checked before a start.

Dask would accept any callable, and queue a task for a thread that never becomes free.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from dps.cluster.names import Node
from dps.errors import CapacityError, ConfigurationError

if TYPE_CHECKING:
    import distributed

_NEVER_RUN: dict[str, Callable[[object], bool]] = {
    "a coroutine function (async def)": inspect.iscoroutinefunction,
    "an asynchronous generator": inspect.isasyncgenfunction,
    "a generator (it has a yield)": inspect.isgeneratorfunction,
}
_WORKER_KEY = "dps-worker-"
_dask_pickle_log = logging.getLogger("distributed.protocol.pickle")


def check_function(train: Any, *given: str) -> None:
    """Refuse what is no function of these arguments, or would return before its body has run.

    Raises
    ------
    ConfigurationError
        It says what `train` is, and what is expected.
    """
    wanted = f"expected a function of {' and '.join(given)}"
    if not callable(train):
        raise ConfigurationError(f"train={train!r}, {wanted}")
    called = train.func if isinstance(train, partial) else train
    for kind, is_kind in _NEVER_RUN.items():
        if is_kind(called) or is_kind(type(called).__call__):
            raise ConfigurationError(f"train={train!r} is {kind}, {wanted}: a plain `def`")
    try:
        inspect.signature(train).bind(*given)
    except ValueError:  # one that is written in C may have no signature
        return
    except TypeError as error:
        raise ConfigurationError(f"train={train!r}, {wanted}: {error}") from None


@contextmanager
def must_be_sent(argument: str, given: str) -> Iterator[None]:
    """Raise one clear error if what is sent meanwhile cannot be, instead of five tracebacks.

    Raises
    ------
    ConfigurationError
        The `argument` holds something that exists in this process only; it is `given` enough.
    """
    _dask_pickle_log.addFilter(_drop)
    try:
        yield
    except (TypeError, AttributeError) as error:
        if not any(word in str(error) for word in ("pickle", "Could not serialize")):
            raise
        raise ConfigurationError(
            f"{argument} cannot be sent to a node: {error.__cause__ or error}. It uses something "
            "that exists in this process only, such as the ParameterServer, a Dask client, a lock "
            f"or an open file: use the {given} that your function is given, and make everything "
            "else inside the function"
        ) from None
    finally:
        _dask_pickle_log.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return False


def check_threads(
    client: distributed.Client, nodes: Sequence[Node], workers: int, group: str, own: Sequence[str]
) -> None:
    """Refuse to start more workers than threads are free.

    `own` are the workers of this `group` that hold a thread, or wait for one.

    Raises
    ------
    CapacityError
        It says what holds the threads.
    """
    threads = sum(node.threads for node in nodes)
    holders = {"this parameter server": own, **_others(client, nodes, group)}
    free = max(0, threads - sum(map(len, holders.values())))
    if workers <= free:
        return
    there = f"workers={workers}, but the {len(nodes)} nodes for workers have {threads} threads"
    held = "; ".join(f"{', '.join(names)} of {who}" for who, names in holders.items() if names)
    if not held:
        raise CapacityError(f"{there} in all; start more Dask workers or ask for fewer")
    raise CapacityError(
        f"{there}, of which {free} are free: {held} run there. Wait for their futures, end them "
        "(ps.stop(), ps.remove_worker(), or ps.close() of the parameter server that they belong "
        "to), or start more Dask workers"
    )


def _others(client: distributed.Client, nodes: Sequence[Node], group: str) -> dict[str, list[str]]:
    """The workers of other parameter servers that are on these nodes, as far as can be asked."""
    if client.asynchronous or not hasattr(client, "processing"):
        return {}
    found: dict[str, list[str]] = {}
    running = client.processing()  # of all nodes: one that is gone meanwhile would be an error
    keys = [str(key) for node in nodes for key in running.get(node.address, ())]
    for key in sorted(key for key in keys if key.startswith(_WORKER_KEY)):
        _, worker, number, name, _ = key.split("-")
        if name != group:
            found.setdefault(f"parameter server {name}", []).append(f"{worker}-{number}")
    return found
