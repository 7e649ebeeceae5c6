"""What a parameter server starts with: the user's arguments, checked, and what they describe.

An argument that cannot work raises `ConfigurationError`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from dps.cluster.backends.assignment import NodeAssignment
from dps.cluster.platform import SYSTEM, Platform, platform_of
from dps.cluster.transport.calls import COORDINATOR_PREFIX
from dps.core.arguments import as_path, check_function, is_name, plain
from dps.core.blocks import Layout
from dps.core.consistency import ASP, BSP, SSP, Consistency
from dps.core.credentials import holds_secret, masked
from dps.core.filters import chain
from dps.core.filters.filter import Filter
from dps.core.functions import Function
from dps.core.placement import ConsistentHash, checked_placement
from dps.core.ranges import one_of, refused, shown, whole_argument
from dps.core.rules.rule import UpdateRule, by_rows
from dps.core.rules.wrappers import as_rule, check_names
from dps.core.shard import ShardState
from dps.core.tables.key_routing import dealt_out, separated
from dps.core.tables.table import SparseSpec, SparseTable
from dps.errors import ConfigurationError
from dps.events import Sink
from dps.protocol.group import Group
from dps.protocol.timings import Timings
from dps.protocol.transport import TRANSPORTS, Endpoint, TransportChoice
from dps.recovery.files import absolute, in_memory
from dps.recovery.manifest import (
    Saved,
    find_saved,
    must_be_known,
    resharded,
    write_run,
)
from dps.recovery.strategy import Recovery, as_servers, preset

if TYPE_CHECKING:
    import distributed

ON_LOSS = ("warn", "raise", "ignore")
_LABEL = re.compile(r"[a-z][a-z0-9_]*")
_OWN_LABELS = ("event", "group", "node", "shard", "epoch", "worker", "le")


@dataclass(frozen=True, slots=True)
class Choices:
    """Arguments of `ParameterServer` that are kept beside its checkpoints, for `resume`."""

    shards: int
    servers: int | None
    tables: Sequence[SparseSpec]
    optimizer: UpdateRule | Mapping[str, UpdateRule]
    consistency: Consistency
    recovery: str | Recovery
    filters: Mapping[str, Sequence[Filter]]
    pull_filters: Mapping[str, Sequence[Filter]]
    placement: str | ConsistentHash
    about: Mapping[str, Any]

    def __post_init__(self) -> None:
        try:
            json.dumps(dict(self.about))
        except (TypeError, ValueError) as error:
            raise refused("about", self.about, f"a mapping that is JSON ({error})") from None
        if not isinstance(self.consistency, BSP | SSP | ASP):
            raise refused("consistency", self.consistency, "BSP(), SSP(4) or ASP()")
        if isinstance(self.tables, str) or not isinstance(self.tables, Sequence):
            raise ConfigurationError(
                f"tables is {type(self.tables).__name__}, expected a list of SparseSpec(name, "
                "width, ...)"
            )
        for table in self.tables:
            if not isinstance(table, SparseSpec):
                raise ConfigurationError(
                    f"tables holds {type(table).__name__}, expected SparseSpec(name, width, ...)"
                )


@dataclass(frozen=True, slots=True)
class Options:
    """Arguments of `ParameterServer` and `resume` that are not kept beside checkpoints."""

    timings: Timings
    on_event: Sink | None
    functions: Mapping[str, Function]
    seats: NodeAssignment | None
    labels: Mapping[str, str]
    on_loss: str
    transport: TransportChoice

    def __post_init__(self) -> None:
        if not isinstance(self.timings, Timings):
            raise refused("timings", self.timings, "Timings(…)")
        if self.on_event is not None:
            check_function("on_event", self.on_event, ["event"])
        if not isinstance(self.functions, Mapping):
            raise refused("functions", self.functions, "a mapping of names to functions")
        for name, function in self.functions.items():
            if not is_name(name):
                raise ConfigurationError(f"functions[{shown(name)}]: expected a name, as text")
            check_function(f"functions[{name!r}]", function, ["arrays"], more=True)
        if not isinstance(self.seats, NodeAssignment | None):
            raise refused("seats", self.seats, "those of an ExistingCluster")
        _check_labels(self.labels)
        one_of("on_loss", self.on_loss, ON_LOSS)
        one_of("transport", self.transport, TRANSPORTS)

    def applied(self, group: Group, platform: Platform) -> Group:
        """Return a group with these options."""
        if self.functions:
            group.recovery.must_allow("functions")
        return replace(
            group,
            timings=self.timings,
            recorded=self.on_event is not None,
            functions=dict(self.functions),
            labels=dict(self.labels),
            on_loss=self.on_loss,
            transport=platform.way(self.transport),
        )


@dataclass(frozen=True, slots=True)
class Start:
    """A group, and the state that it starts with.

    Attributes
    ----------
    initial
        Each shard's buffer of initial values; empty if it was saved.
    saved
        The checkpoints that it resumes from, if any.
    about
        What is kept beside its checkpoints for the user.
    tables
        Each shard's rows that sparse tables begin with.
    """

    group: Group
    initial: tuple[np.ndarray, ...]
    saved: Saved | None
    about: Mapping[str, Any]
    tables: tuple[dict[str, SparseTable], ...] = ()

    @property
    def states(self) -> tuple[ShardState, ...]:
        """The saved state of each shard; none for a new parameter server."""
        return self.saved.states if self.saved is not None else ()

    @property
    def generation(self) -> int:
        """How often the parameter server was resumed."""
        return self.saved.run.generation + 1 if self.saved is not None else 0

    async def leave_description(self, now: float) -> None:
        """Write what `resume` needs beside the checkpoints; `now` is the time."""
        if self.group.recovery.durability.writes_checkpoints:
            run = self.group.as_run(self.generation, now, json.dumps(self.about))
            await asyncio.to_thread(write_run, run)


def afresh(
    client: distributed.Client,
    params: Mapping[str, np.ndarray],
    choices: Choices,
    options: Options,
) -> Start:
    """Start from initial values."""
    platform = platform_of(client)
    recovery = checked_recovery(choices.recovery, platform)
    if choices.tables:
        recovery.must_allow("tables")
    rule = as_rule(choices.optimizer)
    tables, rows = separated(choices.tables)
    layout = Layout.of(params, choices.shards, whole_rows=by_rows(rule), tables=tables)
    params = {name: plain(name, array) for name, array in params.items()}
    check_names(rule, [*layout.names, *(table.name for table in layout.tables)])
    filters = chain.checked(choices.filters, layout.names, rule)
    pull_filters = chain.checked_of_pulls(choices.pull_filters, layout.names)
    if pull_filters:
        recovery.must_allow("filtered pulls")
    if recovery.durability.writes_checkpoints:
        must_be_known("optimizer", rule)
        must_be_known("filters", filters)
        must_be_known("pull_filters", pull_filters)
    servers = choices.servers
    if servers is not None:
        servers = as_servers(servers, len(layout.shards), recovery)
    name, coordinator = _place(client)
    group = Group(
        name,
        layout,
        rule,
        choices.consistency,
        recovery,
        coordinator,
        filters=filters,
        servers=servers,
        pull_filters=pull_filters,
        placement=checked_placement(choices.placement, servers),
    )
    initial = tuple(layout.gather(s, params)[0].copy() for s in range(len(layout.shards)))
    begun = tuple(dealt_out(layout, rows, rule)) if rows else ()
    return Start(options.applied(group, platform), initial, None, choices.about, begun)


def from_path(
    client: distributed.Client,
    path: str | PathLike[str],
    shards: int | None,
    servers: int | None,
    options: Options,
) -> Start:
    """Start from the newest checkpoints below a path; raises `StoreUnavailable` without any.

    `shards` and `servers` are their new numbers; None: as before.
    """
    platform = platform_of(client)
    if shards is not None:
        shards = whole_argument("shards", shards, 1, "shards")
    saved = find_saved(shared_path(platform.place(as_path("path", path))))
    if shards is not None and shards != len(saved.states):
        saved = resharded(saved, shards)
    run = saved.run
    count = len(run.layout.shards)
    if servers is None and run.servers is not None:  # as before, as far as there are replicas
        servers = min(run.servers, count * run.recovery.durability.above.replicas)
    if servers is not None:
        servers = as_servers(servers, count, run.recovery)
    name, coordinator = _place(client)
    group = Group(
        name,
        run.layout,
        run.rule,
        run.consistency,
        run.recovery,
        coordinator,
        incarnations=saved.incarnations,
        filters=run.filters,
        servers=servers,
        pull_filters=run.pull_filters,
        placement=run.placement,
    )
    return Start(options.applied(group, platform), (), saved, json.loads(run.about))


def check_client(client: object) -> None:
    """Refuse what is not a connected Dask client."""
    from distributed import Client

    if not isinstance(client, Client) and platform_of(client) is SYSTEM:
        raise refused("client", client, "a Dask client: distributed.Client(cluster or address)")
    if getattr(client, "scheduler", None) is None:
        raise ConfigurationError("the Dask client is closed; give one that is connected")


def checked_recovery(recovery: object, platform: Platform = SYSTEM) -> Recovery:
    """Return a recovery, given by name or as it is, with its checkpoints at a shared path."""
    chosen = preset(recovery) if isinstance(recovery, str) else recovery
    if not isinstance(chosen, Recovery):
        raise refused("recovery", recovery, "a preset's name or Recovery(durability=..., ...)")
    if not chosen.durability.writes_checkpoints:
        return chosen
    return chosen.at(shared_path(platform.place(chosen.path)))


def shared_path(path: str | None) -> str:
    """Return a checkpoint path as every node sees it, if there is one that all of them share."""
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


def _place(client: distributed.Client) -> tuple[str, Endpoint]:
    """Return a name for the group, and the address of its coordinator."""
    name = platform_of(client).token()
    return name, Endpoint(client.scheduler.address, COORDINATOR_PREFIX + name)


def _check_labels(labels: object) -> None:
    if not isinstance(labels, Mapping):
        raise refused("labels", labels, "a mapping of names to texts")
    for name, value in labels.items():
        allowed = isinstance(name, str) and _LABEL.fullmatch(name) and name not in _OWN_LABELS
        if not allowed or not isinstance(value, str):
            expected = "a text under a name of lower-case letters, digits and _, other than "
            raise refused(f"labels[{shown(name)}]", value, expected + ", ".join(_OWN_LABELS))
