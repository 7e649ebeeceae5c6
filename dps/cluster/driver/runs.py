"""Requirements of a run of workers: a function that can be sent, free threads, and shares of data.

A collection is divided by whole partitions, as equally as their number allows. A worker's share is
computed on its node; partitions that a node holds already stay there as far as equal shares allow.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from graphlib import TopologicalSorter
from itertools import islice
from typing import TYPE_CHECKING, Any

from dps.cluster.names import Node
from dps.core.leases import examples_of
from dps.core.ranges import whole
from dps.errors import CapacityError, ConfigurationError

if TYPE_CHECKING:
    import distributed

MAX_ELEMENTS = 1000  # a longer collection is not searched for futures
COPIES = 8  # of the data of a run, on as many nodes
_WORKER_KEY = "dps-worker-"
_dask_pickle_log = logging.getLogger("distributed.protocol.pickle")


@contextmanager
def must_be_sent(argument: str, given: str) -> Iterator[None]:
    """Raise a `ConfigurationError` that recommends `given` if an `argument` cannot be sent."""
    _dask_pickle_log.disabled = True  # Dask would print five tracebacks
    try:
        yield
    except (TypeError, AttributeError) as error:
        if not any(word in str(error) for word in ("pickle", "Could not serialize")):
            raise
        raise ConfigurationError(
            f"{argument} cannot be sent to a node: {error.__cause__ or error}. It refers to an "
            "object of this process, such as the ParameterServer, a Dask client, a lock or an open "
            f"file. Use the {given} that your function receives, and create other objects inside "
            "the function"
        ) from None
    finally:
        _dask_pickle_log.disabled = False


def refuse_futures(train: Callable[..., Any]) -> None:
    """Refuse a `functools.partial` with Dask futures among its arguments."""
    from distributed import Future

    given = [*train.args, *train.keywords.values()] if isinstance(train, partial) else []
    while given:
        each = given.pop()
        if isinstance(each, Future):
            raise ConfigurationError(
                "functools.partial binds a Dask future to the training function, and nodes cannot "
                "read it; pass data=[future, …] and take the worker's share as second argument: "
                "train(worker, data)"
            )
        if isinstance(each, list | tuple | dict) and len(each) <= MAX_ELEMENTS:
            given += each.values() if isinstance(each, dict) else each


def check_threads(
    client: distributed.Client, nodes: Sequence[Node], workers: int, group: str, own: Sequence[str]
) -> None:
    """Refuse more workers than free threads; the workers `own` hold or wait for a thread."""
    threads = sum(node.threads for node in nodes)
    holders = {"this parameter server": list(own)}
    for key in sorted(key for key in processing(client, nodes) if key.startswith(_WORKER_KEY)):
        _, worker, number, name, _ = key.split("-")
        if name != group:
            holders.setdefault(f"parameter server {name}", []).append(f"{worker}-{number}")
    free = max(0, threads - sum(map(len, holders.values())))
    if workers > free:
        held = "; ".join(f"{', '.join(names)} of {who}" for who, names in holders.items() if names)
        raise CapacityError(
            f"workers={workers}, but the {len(nodes)} nodes for workers have {threads} threads, of "
            f"which {free} are free: {held or 'no workers'} run there. Start more Dask workers, "
            "choose fewer workers, or end running ones, such as with ps.stop()"
        )


def processing(client: distributed.Client, nodes: Sequence[Node]) -> set[str]:
    """Return the keys of the tasks on some nodes; none if the client cannot ask here."""
    if client.asynchronous or not hasattr(client, "processing"):
        return set()
    running = client.processing()  # of all nodes: an error if one of those named has ended
    return {str(key) for node in nodes for key in running.get(node.address, ())}


def copies_of(
    client: distributed.Client, data: Any, key: str, addresses: Sequence[str]
) -> list[distributed.Future]:
    """Send copies of data to several nodes, under keys that begin with `key`; return the futures.

    []: it has to be sent with each task, or may as well be.
    """
    if whole(data) is not None or client.asynchronous or not hasattr(client, "scatter"):
        return []
    # Of replicas under one key, Dask's active memory manager soon deletes all but one.
    keys = {f"{key}-{number}": node for number, node in enumerate(addresses[:COPIES])}
    try:
        with must_be_sent("data", "worker"):
            return [client.scatter({k: data}, workers=[node])[k] for k, node in keys.items()]
    except (KeyError, OSError) as error:
        raise CapacityError(f"a node was lost while the data was sent: {error!r}") from error


def shares_of(
    client: distributed.Client, data: Any, workers: int, addresses: Sequence[str]
) -> list[list[distributed.Future]]:
    """Begin to compute each worker's partitions; worker i is expected on `addresses[i % n]`."""
    _check_can_compute(client)
    from distributed import futures_of

    graph, keys = _partitions(data)
    if len(keys) < workers:
        raise ConfigurationError(
            f"data has {len(keys)} partitions, expected at least {workers}, one for each worker; "
            "split it further (rechunk, repartition), or start fewer workers"
        )
    nodes = [addresses[worker % len(addresses)] for worker in range(workers)]
    needs = {key: getattr(task, "dependencies", ()) for key, task in graph.items()}
    order = list(TopologicalSorter(needs).static_order())
    held = futures_of(data)
    # An asynchronous client cannot ask here, so nothing is taken to be in memory.
    known = client.who_has(held) if held and not client.asynchronous else {}
    holders = {key: set(addresses) for key, addresses in known.items()}
    for key in order:  # the nodes that hold all dependencies of a task
        parts = [holders[need] for need in needs.get(key, ()) if need in holders]
        if parts and key not in holders:
            holders[key] = set.intersection(*parts)
    chosen = assigned([holders.get(key, set()) for key in keys], nodes)
    near: dict[Any, str | None]
    near = {keys[i]: node for node, indices in zip(nodes, chosen, strict=True) for i in indices}
    for key in reversed(order):  # tasks run where the partition is; None: several nodes need them
        node = near.get(key)
        for need in needs.get(key, ()):
            near[need] = node if near.setdefault(need, node) == node else None
    where = {key: [node] for key, node in near.items() if node is not None}
    futures = _compute(client, graph, keys, partial(_node_of, where))
    return [[futures[number] for number in numbers] for numbers in chosen]


def is_collection(data: Any) -> bool:
    """Whether data is a Dask collection, a list of futures, or a tuple of these."""
    from dask import is_dask_collection

    if isinstance(data, tuple):
        return any(map(is_collection, data))
    return is_dask_collection(data) or _are_futures(data)


def partitions_of(
    client: distributed.Client, data: Any, addresses: Sequence[str]
) -> list[distributed.Future]:
    """Begin to compute the partitions of a collection on some nodes."""
    _check_can_compute(client)
    return _compute(client, *_partitions(data), [*addresses])


def sizes_of(client: distributed.Client, partitions: Sequence[distributed.Future]) -> list[int]:
    """Wait until partitions are computed; return how many examples each has."""
    return list(client.gather(client.map(examples_of, partitions, pure=False)))


def _check_can_compute(client: distributed.Client) -> None:
    if not hasattr(client, "compute"):
        raise ConfigurationError(
            "data=… needs a Dask cluster of processes; on virtual time bind the data with "
            "functools.partial(train, data)"
        )


def _compute(
    client: distributed.Client, graph: Mapping[Any, Any], keys: Sequence[Any], workers: Any
) -> list[distributed.Future]:
    """Begin to compute the keys of a graph; `workers` are as in `dask.annotate`."""
    from dask import annotate
    from dask.highlevelgraph import HighLevelGraph

    # One graph for all partitions: with one for each, Dask would traverse everything each time.
    with annotate(workers=workers, allow_other_workers=True):
        # As a layer: Dask would hash a plain graph to name it, which takes seconds.
        layered = HighLevelGraph.from_collections(f"dps-{uuid.uuid4().hex}", graph)
        return list(client.get(layered, keys, sync=False))


def assigned(holders: Sequence[set[str]], nodes: Sequence[str]) -> list[list[int]]:
    """Return each worker's partitions, given the holders of partitions, and the workers' nodes."""
    smallest, larger = divmod(len(holders), len(nodes))
    sizes = [smallest + (worker < larger) for worker in range(len(nodes))]
    chosen: list[list[int]] = [[] for _ in nodes]
    left = []
    for number, held_by in enumerate(holders):
        near = [w for w, node in enumerate(nodes) if node in held_by and len(chosen[w]) < sizes[w]]
        if near:
            chosen[min(near, key=lambda worker: len(chosen[worker]))].append(number)
        else:
            left.append(number)
    rest = iter(left)
    return [
        sorted([*numbers, *islice(rest, size - len(numbers))])
        for numbers, size in zip(chosen, sizes, strict=True)
    ]


def _partitions(data: Any) -> tuple[dict[Any, Any], list[Any]]:
    """Return the graph of a collection, and the key of each partition in it."""
    from dask import delayed
    from dask._task_spec import Task, TaskRef
    from dask.base import tokenize

    if isinstance(data, tuple):
        graphs, columns = zip(*map(_partitions, data), strict=True) if data else ((), ())
        counts = [len(column) for column in columns]
        if len(set(counts)) != 1:
            raise ConfigurationError(
                f"the collections of data have {counts} partitions, expected equal numbers: "
                "partitions with the same index form one share"
            )
        name = f"dps-partition-{tokenize(columns)}"
        rows = {(name, i): row for i, row in enumerate(zip(*columns, strict=True))}
        graph = {key: Task(key, _together, *map(TaskRef, row)) for key, row in rows.items()}
        return {key: task for each in (*graphs, graph) for key, task in each.items()}, list(rows)
    if _are_futures(data):
        parts = [delayed(each) for each in data]
    elif hasattr(data, "numblocks") and any(blocks > 1 for blocks in data.numblocks[1:]):
        raise ConfigurationError(
            f"data is an array of {data.numblocks} chunks, expected one chunk along every axis but "
            "the first, so that workers receive whole rows: x.rechunk({1: -1})"
        )
    elif hasattr(data, "to_delayed"):
        pieces = data.to_delayed()
        parts = list(pieces.ravel()) if hasattr(pieces, "ravel") else list(pieces)
    else:
        raise ConfigurationError(
            f"data is {type(data).__name__}, expected a Dask array, DataFrame or bag, a list of "
            "futures such as Client.scatter returns, or a tuple of these"
        )
    unique = {id(part.dask): part.dask for part in parts}  # usually all parts share one graph
    graph = {key: task for each in unique.values() for key, task in each.items()}
    return graph, [part.key for part in parts]


def _are_futures(data: Any) -> bool:
    from distributed import Future

    return isinstance(data, list) and bool(data) and all(isinstance(e, Future) for e in data)


def _together(*parts: Any) -> tuple[Any, ...]:
    return parts


def _node_of(where: Mapping[Any, list[str]], key: Any) -> list[str]:
    return where.get(key, [])  # []: any node
