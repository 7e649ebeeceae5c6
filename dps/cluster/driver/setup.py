"""What a parameter server starts with: initial values, or what an earlier one has saved."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from dps.cluster.backends.assignment import NodeAssignment
from dps.cluster.platform import SYSTEM, Platform, platform_of
from dps.cluster.transport.calls import COORDINATOR_PREFIX
from dps.core.arguments import as_path, check_function, is_name, plain
from dps.core.blocks import Layout
from dps.core.consistency import Consistency
from dps.core.filters.filter import Filter
from dps.core.placement import BALANCED, ConsistentHash, checked_placement
from dps.core.rules.per_array import as_rule, check_names
from dps.core.rules.rule import UpdateRule, by_rows, slots_by_name
from dps.core.shard import ShardState
from dps.core.tables.key_routing import begun_rows, dealt_out, without_rows
from dps.core.tables.spec import SparseSpec
from dps.core.tables.table import SparseTable
from dps.errors import ConfigurationError
from dps.protocol.compression import checked_filters, checked_pull_filters
from dps.protocol.group import Group
from dps.protocol.timings import Timings
from dps.protocol.transport import TRANSPORTS, Endpoint
from dps.recovery.manifest import Saved, about, find_saved, must_be_known, resharded, write_run
from dps.recovery.strategy import Recovery, as_servers

if TYPE_CHECKING:
    import distributed

import re

from dps.core.consistency import ASP, BSP, SSP
from dps.core.credentials import holds_secret, masked
from dps.core.functions import Function
from dps.core.ranges import one_of, refused, shown, whole_argument
from dps.recovery.files import absolute, in_memory
from dps.recovery.strategy import preset


@dataclass(frozen=True, slots=True)
class Start:
    """A group, its initial values by shard, or what it goes on from; and what is kept of it.

    `tables` are the rows by shard that sparse tables begin with.
    """

    group: Group
    initial: tuple[np.ndarray, ...]
    saved: Saved | None
    about: Mapping[str, Any]
    tables: tuple[dict[str, SparseTable], ...] = ()

    @property
    def states(self) -> tuple[ShardState, ...]:
        """The state of each shard that was saved; none if it starts afresh."""
        return self.saved.states if self.saved is not None else ()

    async def leave_description(self, now: float) -> None:
        """Put beside the checkpoints what is needed to go on from them; `now` is the time."""
        if self.group.recovery.durability.writes_checkpoints:
            generation = self.saved.run.generation + 1 if self.saved is not None else 0
            run = self.group.as_run(generation, now, json.dumps(self.about))
            await asyncio.to_thread(write_run, run)


def afresh(
    client: distributed.Client,
    params: Mapping[str, np.ndarray],
    shards: int,
    optimizer: UpdateRule | Mapping[str, UpdateRule],
    consistency: Consistency,
    recovery: str | Recovery,
    timings: Timings,
    kept: Mapping[str, Any],
    tables: Sequence[SparseSpec] = (),
    filters: Mapping[str, Sequence[Filter]] | None = None,
    servers: int | None = None,
    pull_filters: Mapping[str, Sequence[Filter]] | None = None,
    placement: str | ConsistentHash = BALANCED,
) -> Start:
    """Start from initial values; raises `ConfigurationError` if the choices cannot work."""
    name, coordinator = _place(client)
    if not isinstance(timings, Timings):
        raise refused("timings", timings, "Timings(…)")
    try:
        json.dumps(dict(kept))
    except (TypeError, ValueError) as error:
        raise refused("about", kept, f"a mapping that is JSON ({error})") from None
    if not isinstance(consistency, BSP | SSP | ASP):
        raise refused("consistency", consistency, "BSP(), SSP(4) or ASP()")
    chosen = checked_recovery(recovery, platform_of(client))
    check_tables(tables, chosen)
    rule = as_rule(optimizer)
    begun = begun_rows(tables)
    plain_tables = without_rows(tables)
    layout = Layout.of(params, shards, whole_rows=by_rows(rule), tables=plain_tables)
    params = {name: plain(name, array) for name, array in params.items()}
    check_names(rule, [*layout.names, *(table.name for table in layout.tables)])
    chains = checked_filters({} if filters is None else filters, layout.names, rule)
    given = {} if pull_filters is None else pull_filters
    of_pulls = checked_pull_filters(given, layout.names, chosen.durability)
    if chosen.durability.writes_checkpoints:
        must_be_known("optimizer", rule)
        must_be_known("filters", chains)
        must_be_known("pull_filters", of_pulls)
    if servers is not None:
        servers = as_servers(servers, len(layout.shards), chosen)
    ring = checked_placement(placement, servers)
    initial = tuple(layout.gather(s, params)[0].copy() for s in range(len(layout.shards)))
    choices = rule, consistency, chosen, coordinator, timings
    group = Group(
        name,
        layout,
        *choices,
        filters=chains,
        servers=servers,
        pull_filters=of_pulls,
        placement=ring,
    )
    rows = tuple(dealt_out(layout, begun, slots_by_name(rule))) if begun else ()
    return Start(group, initial, None, kept, rows)


def from_path(
    client: distributed.Client,
    path: str | PathLike[str],
    timings: Timings,
    shards: int | None = None,
    servers: int | None = None,
) -> Start:
    """Start from the newest checkpoints below a path; raises `StoreUnavailable` without any.

    `shards` and `servers` are how many there are to be; None: as many as there were.
    """
    name, coordinator = _place(client)
    if shards is not None:
        shards = whole_argument("shards", shards, 1, "shards")
    path = as_path("path", path)
    saved = find_saved(shared_path(platform_of(client).place(path)))
    if shards is not None and shards != len(saved.states):
        saved = resharded(saved, shards)
    run = saved.run
    count = len(run.layout.shards)
    if servers is None and run.servers is not None:  # as many, or as many as can be had of them
        servers = min(run.servers, count * run.recovery.durability.replicas)
    if servers is not None:
        servers = as_servers(servers, count, run.recovery)
    group = Group(
        name,
        run.layout,
        run.rule,
        run.consistency,
        run.recovery,
        coordinator,
        timings,
        saved.incarnations,
        filters=run.filters,
        servers=servers,
        pull_filters=run.pull_filters,
        placement=run.placement,
    )
    return Start(group, (), saved, about(run))


def check_client(client: object) -> None:
    """Refuse what is no Dask client that is connected; raises `ConfigurationError`."""
    from distributed import Client

    if not isinstance(client, Client) and platform_of(client) is SYSTEM:
        raise refused("client", client, "a Dask client: distributed.Client(cluster or address)")
    if getattr(client, "scheduler", None) is None:
        raise ConfigurationError("the Dask client is closed; give one that is connected")


def _place(client: distributed.Client) -> tuple[str, Endpoint]:
    """A name for the group, and where its coordinator will be."""
    name = platform_of(client).token()
    return name, Endpoint(client.scheduler.address, COORDINATOR_PREFIX + name)


_LABEL = re.compile(r"[a-z][a-z0-9_]*")
ON_LOSS = ("warn", "raise", "ignore")
_OWN_LABELS = ("event", "group", "node", "shard", "epoch", "worker", "le")


def checked_recovery(recovery: object, platform: Platform = SYSTEM) -> Recovery:
    """Return the recovery that is meant, by name or as it is.

    Raises
    ------
    ConfigurationError
        It is neither, or checkpoints cannot go where they are to go.
    """
    chosen = preset(recovery) if isinstance(recovery, str) else recovery
    if not isinstance(chosen, Recovery):
        raise refused("recovery", recovery, "a preset's name or Recovery(durability=..., ...)")
    durability = chosen.durability
    if not durability.writes_checkpoints:
        return chosen
    return chosen.at(shared_path(platform.place(durability.path)))


def shared_path(path: str | None) -> str:
    """Return a checkpoint path as every node of a cluster has to see it.

    Raises
    ------
    ConfigurationError
        There is none, fsspec does not know it, each process would see another one, or it holds a
        password.
    """
    if path is None:
        raise ConfigurationError(
            "checkpoints need a path that all server nodes can reach: give "
            "recovery=Recovery(Checkpoint(path=...))"
        )
    if holds_secret(str(path)):
        raise ConfigurationError(
            f"the path of checkpoints {masked(str(path))!r} holds a password, which would be "
            "written down with it: leave it out, and give it by the environment, as the package "
            "that fsspec uses for such paths says"
        )
    if in_memory(path):
        raise ConfigurationError(
            f"checkpoints in {path!r} would be lost with the process that wrote them; give a path "
            "that all server nodes can reach"
        )
    return absolute(path)


def check_options(on_event: object, seats: object, on_loss: object, transport: object) -> None:
    """Refuse what is none of a group's options; raises `ConfigurationError`."""
    if on_event is not None:
        check_function("on_event", on_event, ["event"])
    if not isinstance(seats, NodeAssignment | None):
        raise refused("seats", seats, "those of an ExistingCluster")
    one_of("on_loss", on_loss, ON_LOSS)
    one_of("transport", transport, TRANSPORTS)


def check_tables(tables: object, recovery: Recovery) -> None:
    """Refuse sparse tables where they would not survive; raises `ConfigurationError`."""
    if isinstance(tables, str) or not isinstance(tables, Sequence):
        raise ConfigurationError(
            f"tables is {type(tables).__name__}, expected a list of SparseSpec(name, width, ...)"
        )
    for table in tables:
        if not isinstance(table, SparseSpec):
            raise ConfigurationError(
                f"tables holds {type(table).__name__}, expected SparseSpec(name, width, ...)"
            )
    if tables:
        recovery.must_allow("tables")


def check_functions(functions: Mapping[str, Function], recovery: Recovery) -> None:
    """Refuse functions that cannot be called by name, or not under this recovery.

    Raises
    ------
    ConfigurationError
        No name, nothing to call, or checkpoints that take all shards back.
    """
    if not isinstance(functions, Mapping):
        raise refused("functions", functions, "a mapping of names to functions")
    for name, function in functions.items():
        if not is_name(name):
            raise ConfigurationError(f"functions[{shown(name)}]: expected a name, as text")
        check_function(f"functions[{name!r}]", function, ["arrays"], more=True)
    if functions:
        recovery.must_allow("functions")


def checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return what goes with metrics and lines of the log; raises `ConfigurationError`."""
    if not isinstance(labels, Mapping):
        raise refused("labels", labels, "a mapping of names to texts")
    for name, value in labels.items():
        named = isinstance(name, str) and _LABEL.fullmatch(name) and name not in _OWN_LABELS
        if not named or not isinstance(value, str):
            raise refused(
                f"labels[{shown(name)}]",
                value,
                "a text under a name of lower-case letters, digits and _, other than "
                f"{', '.join(_OWN_LABELS)}",
            )
    return dict(labels)
