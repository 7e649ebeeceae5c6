"""Shares of Dask collections: which partitions each worker is given, and where they are computed.

A collection is shared out by whole partitions, as equally as their number allows. A worker's share
is computed on its node; what a node holds already stays there as far as equal shares allow.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

from dps.errors import ConfigurationError

if TYPE_CHECKING:
    import distributed

MOST_ELEMENTS = 1000  # of a list that is searched for what must not be in it

_Needs = Mapping[Any, Collection[Any]]  # of each task of a graph the tasks that it needs


def shares_of(
    client: distributed.Client, data: Any, workers: int, addresses: Sequence[str]
) -> list[list[distributed.Future]]:
    """Begin to compute each worker's partitions on its node; return the futures of each worker.

    Parameters
    ----------
    data
        As for `ParameterServer.run`.
    workers
        Number of workers that share it; worker i is expected on node ``i % len(addresses)``.
    addresses
        Dask addresses of the nodes that workers may run on.

    Raises
    ------
    ConfigurationError
        It is no collection that can be shared out, or has fewer partitions than there are workers.
    """
    if not hasattr(client, "compute"):
        raise ConfigurationError(
            "data=… needs a Dask cluster of processes; on virtual time give a worker its data by "
            "functools.partial(train, data)"
        )
    from dask import annotate
    from dask.highlevelgraph import HighLevelGraph

    graph, keys = _partitions(data)
    if len(keys) < workers:
        raise ConfigurationError(
            f"workers={workers} need as many partitions of data, which has {len(keys)}; split "
            "it further (rechunk, repartition), or start fewer workers"
        )
    nodes = [addresses[worker % len(addresses)] for worker in range(workers)]
    needs = {key: getattr(task, "dependencies", ()) for key, task in graph.items()}
    chosen = assigned(_holders(client, data, keys, needs), nodes)
    at = {keys[i]: node for node, mine in zip(nodes, chosen, strict=True) for i in mine}
    # One graph for all: with one for each partition Dask would go through everything as often.
    with annotate(workers=partial(_node_of, _near(at, needs)), allow_other_workers=True):
        # As a layer: Dask would make a name of the contents of a plain graph, which takes seconds.
        layered = HighLevelGraph.from_collections(f"dps-{uuid.uuid4().hex}", graph)
        futures = client.get(layered, keys, sync=False)
    return [[futures[number] for number in numbers] for numbers in chosen]


def assigned(holders: Sequence[set[str]], nodes: Sequence[str]) -> list[list[int]]:
    """Return the numbers of the partitions of each worker, in order.

    Parameters
    ----------
    holders
        The addresses of the nodes that hold each partition already; empty if none does.
    nodes
        The address of each worker's node.

    Returns
    -------
    numbers
        For each worker; their lengths differ by one at most.
    """
    smallest, larger = divmod(len(holders), len(nodes))
    sizes = [smallest + (worker < larger) for worker in range(len(nodes))]
    found: list[list[int]] = [[] for _ in nodes]
    left = []
    for number, held_by in enumerate(holders):
        near = [w for w, node in enumerate(nodes) if node in held_by and len(found[w]) < sizes[w]]
        if near:
            found[min(near, key=lambda worker: len(found[worker]))].append(number)
        else:
            left.append(number)
    for numbers, size in zip(found, sizes, strict=True):
        missing = size - len(numbers)
        numbers.extend(left[:missing])
        del left[:missing]
    return [sorted(numbers) for numbers in found]


def refuse_futures(train: Callable[..., Any]) -> None:
    """Refuse a training function that was given Dask futures, which are of no use on a node.

    Raises
    ------
    ConfigurationError
        One stands among the arguments of a `functools.partial`.
    """
    from distributed import Future

    given = [*train.args, *train.keywords.values()] if isinstance(train, partial) else []
    while given:
        each = given.pop()
        if isinstance(each, Future):
            raise ConfigurationError(
                "the training function was given a Dask future by functools.partial, which cannot "
                "be read on a node; pass it as data=[future, …] and take the worker's share as "
                "second argument: train(worker, data)"
            )
        if isinstance(each, list | tuple | dict) and len(each) <= MOST_ELEMENTS:
            given += each.values() if isinstance(each, dict) else each


def _partitions(data: Any) -> tuple[dict[Any, Any], list[Any]]:
    """Return the graph of a collection, and the key of each partition in it."""
    from dask import delayed
    from dask._task_spec import Task, TaskRef
    from dask.base import tokenize
    from distributed import Future

    if isinstance(data, tuple):
        graphs, columns = zip(*map(_partitions, data), strict=True) if data else ((), ())
        counts = [len(column) for column in columns]
        if len(set(counts)) != 1:
            raise ConfigurationError(
                f"the collections of data have {counts} partitions, expected as many each: those "
                "of the same number belong together"
            )
        name = f"dps-partition-{tokenize(columns)}"
        rows = {(name, i): row for i, row in enumerate(zip(*columns, strict=True))}
        graph = {key: Task(key, _together, *map(TaskRef, row)) for key, row in rows.items()}
        return {key: task for each in (*graphs, graph) for key, task in each.items()}, list(rows)
    if isinstance(data, list) and data and all(isinstance(each, Future) for each in data):
        parts = [delayed(each) for each in data]
    elif hasattr(data, "numblocks") and any(blocks > 1 for blocks in data.numblocks[1:]):
        raise ConfigurationError(
            f"data is an array of {data.numblocks} chunks; a worker is given whole rows: "
            "rechunk it to one chunk along every axis but the first, x.rechunk({1: -1})"
        )
    elif hasattr(data, "to_delayed"):
        found = data.to_delayed()
        parts = list(found.ravel()) if hasattr(found, "ravel") else list(found)
    else:
        raise ConfigurationError(
            f"data is {type(data).__name__}, expected a Dask array, DataFrame or bag, a list of "
            "futures such as Client.scatter returns, or a tuple of these"
        )
    unique = {id(part.dask): part.dask for part in parts}  # as a rule it is the same of all
    graph = {key: task for each in unique.values() for key, task in each.items()}
    return graph, [part.key for part in parts]


def _together(*parts: Any) -> tuple[Any, ...]:
    return parts


def _holders(
    client: distributed.Client, data: Any, keys: Sequence[Any], needs: _Needs
) -> list[set[str]]:
    """Which nodes hold all that a partition is made of; none where it is not computed yet.

    With an asynchronous client nobody can be asked here, and all are taken for not computed.
    """
    from distributed import futures_of

    held = futures_of(data)
    known = client.who_has(held) if held and not client.asynchronous else {}
    if not known:
        return [set() for _ in keys]
    return [_in_memory(needs, key, known) for key in keys]


def _in_memory(needs: _Needs, key: Any, known: Mapping[Any, Sequence[str]]) -> set[str]:
    """The nodes that hold everything in memory that a task begins with."""
    found: set[str] | None = None
    ahead, seen = [key], {key}
    while ahead:
        each = ahead.pop()
        if each in known:
            found = set(known[each]) if found is None else found & set(known[each])
            continue
        new = [need for need in needs.get(each, ()) if need not in seen]
        ahead += new
        seen.update(new)
    return found or set()


def _near(nodes: dict[Any, str], needs: _Needs) -> dict[Any, str]:
    """Return the node of each task, given those of the last ones; none where several need it."""
    found: dict[Any, str | None] = dict(nodes)
    for key in reversed(list(TopologicalSorter(needs).static_order())):
        node = found.get(key)
        for need in needs.get(key, ()):
            found[need] = node if found.setdefault(need, node) == node else None
    return {key: node for key, node in found.items() if node is not None}


def _node_of(near: Mapping[Any, str], key: Any) -> list[str]:
    """Where Dask is to run a task; empty: anywhere."""
    return [near[key]] if key in near else []
