"""Shares of Dask collections: which partitions each worker is given, and where they are computed.

A collection is shared out by whole partitions, as equally as their number allows. A worker's share
is computed on its node; what a node holds already stays there as far as equal shares allow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dps.errors import ConfigurationError

if TYPE_CHECKING:
    import distributed


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
    parts = _partitions(data)
    if len(parts) < workers:
        raise ConfigurationError(
            f"workers={workers} need as many partitions of data, which has {len(parts)}; split "
            "it further (rechunk, repartition), or start fewer workers"
        )
    nodes = [addresses[worker % len(addresses)] for worker in range(workers)]
    chosen = assigned(_holders(client, data, parts), nodes)
    return [
        [
            client.compute(parts[number], workers=[node], allow_other_workers=True)
            for number in numbers
        ]
        for node, numbers in zip(nodes, chosen, strict=True)
    ]


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

    if isinstance(train, partial) and any(
        isinstance(each, Future)
        for given in (*train.args, *train.keywords.values())
        for each in (given if isinstance(given, list | tuple) else [given])
    ):
        raise ConfigurationError(
            "the training function was given a Dask future by functools.partial, which cannot be "
            "read on a node; pass it as data=[future, …] and take the worker's share as second "
            "argument: train(worker, data)"
        )


def _partitions(data: Any) -> list[Any]:
    """Each partition as something that `Client.compute` takes."""
    from dask import delayed
    from distributed import Future

    if isinstance(data, tuple):
        columns = [_partitions(each) for each in data]
        counts = [len(column) for column in columns]
        if not columns or len(set(counts)) > 1:
            raise ConfigurationError(
                f"the collections of data have {counts} partitions, expected as many each: those "
                "of the same number belong together"
            )
        return [delayed(tuple)(list(together)) for together in zip(*columns, strict=True)]
    if isinstance(data, list) and data and all(isinstance(each, Future) for each in data):
        return [delayed(each) for each in data]
    if hasattr(data, "numblocks") and any(blocks > 1 for blocks in data.numblocks[1:]):
        raise ConfigurationError(
            f"data is an array of {data.numblocks} chunks; a worker is given whole rows: "
            "rechunk it to one chunk along every axis but the first, x.rechunk({1: -1})"
        )
    if hasattr(data, "to_delayed"):
        found = data.to_delayed()
        return list(found.ravel()) if hasattr(found, "ravel") else list(found)
    raise ConfigurationError(
        f"data is {type(data).__name__}, expected a Dask array, DataFrame or bag, a list of "
        "futures such as Client.scatter returns, or a tuple of these"
    )


def _holders(client: distributed.Client, data: Any, parts: Sequence[Any]) -> list[set[str]]:
    """Which nodes hold all that a partition is made of; none where it is not computed yet."""
    from distributed import futures_of

    known = client.who_has(futures_of(data))
    if not known:
        return [set() for _ in parts]
    return [_in_memory(dict(part.__dask_graph__()), part.key, known) for part in parts]


def _in_memory(tasks: Mapping[Any, Any], key: Any, known: Mapping[Any, Sequence[str]]) -> set[str]:
    """The nodes that hold everything in memory that a task of a graph begins with."""
    found: set[str] | None = None
    ahead, seen = [key], {key}
    while ahead:
        each = ahead.pop()
        if each in known:
            found = set(known[each]) if found is None else found & set(known[each])
            continue
        needs = getattr(tasks.get(each), "dependencies", ())
        ahead += [need for need in needs if need not in seen]
        seen.update(needs)
    return found or set()
