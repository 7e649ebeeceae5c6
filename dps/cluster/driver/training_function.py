"""Checks before a training function starts: that it can be sent to a node, and has a thread there.

Otherwise Dask would print five tracebacks, or queue a task for a thread that never becomes free.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dps.cluster.names import Node
from dps.errors import CapacityError, ConfigurationError

if TYPE_CHECKING:
    import distributed

_WORKER_KEY = "dps-worker-"
_dask_pickle_log = logging.getLogger("distributed.protocol.pickle")


@contextmanager
def must_be_sent(argument: str, given: str) -> Iterator[None]:
    """Raise one clear error if the `with` block cannot send an object, instead of five tracebacks.

    Raises
    ------
    ConfigurationError
        The `argument` holds an object that exists in this process only. The message recommends
        to use the `given` object instead.
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
    """Refuse to start more workers than there are free threads.

    `own` are the workers of this `group` that hold a thread, or wait for one.

    Raises
    ------
    CapacityError
        Too few threads are free; the message lists what holds them.
    """
    threads = sum(node.threads for node in nodes)
    holders = {"this parameter server": own, **_others(client, nodes, group)}
    free = max(0, threads - sum(map(len, holders.values())))
    if workers <= free:
        return
    there = f"workers={workers}, but the {len(nodes)} nodes for workers have {threads} threads"
    held = "; ".join(f"{', '.join(names)} of {who}" for who, names in holders.items() if names)
    if not held:
        raise CapacityError(f"{there} in all; start more Dask workers or ask for fewer workers")
    raise CapacityError(
        f"{there}, of which {free} are free: {held} run there. Wait for their futures, end them "
        "(ps.stop(), ps.remove_worker(), or ps.close() of the parameter server that they belong "
        "to), or start more Dask workers"
    )


def _others(client: distributed.Client, nodes: Sequence[Node], group: str) -> dict[str, list[str]]:
    """Return the workers of other parameter servers on these nodes, as far as Dask knows."""
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
