"""The start of a parameter server: the checked arguments, and the group that they describe."""

from __future__ import annotations

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
from dps.core.arguments import as_path, check_function, explained, is_name, plain
from dps.core.blocks import Layout
from dps.core.consistency import ASP, BSP, SSP, Consistency
from dps.core.filters import chain
from dps.core.filters.filter import Filter
from dps.core.functions import Function
from dps.core.placement import ConsistentHash, checked_placement
from dps.core.ranges import integer_argument, one_of, refused, shown
from dps.core.rules.rule import UpdateRule, by_rows, rule_for, within
from dps.core.rules.wrappers import Accumulated, as_rule, check_names
from dps.core.tables.key_routing import dealt_out, separated
from dps.core.tables.table import SparseSpec, SparseTable
from dps.errors import ConfigurationError
from dps.events import Sink
from dps.protocol.group import Group
from dps.protocol.timings import Timings
from dps.protocol.transport import TRANSPORTS, Endpoint, TransportChoice
from dps.recovery.files import shared_path
from dps.recovery.manifest import Run, Saved, find_saved, must_be_known, resharded
from dps.recovery.strategy import Recovery, as_servers, preset

if TYPE_CHECKING:
    import distributed

ON_LOSS = ("warn", "raise", "ignore")
_LABEL = re.compile(r"[a-z][a-z0-9_]*")
_OWN_LABELS = ("event", "group", "node", "shard", "epoch", "worker", "le")


@dataclass(frozen=True, slots=True, kw_only=True)
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
        is_list = isinstance(self.tables, Sequence) and not isinstance(self.tables, str)
        if not is_list or not all(isinstance(table, SparseSpec) for table in self.tables):
            raise refused("tables", self.tables, "a list of SparseSpec(name, width, ...)")


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Arguments of `ParameterServer` and `resume` that are not kept beside checkpoints."""

    timings: Timings = Timings()
    on_event: Sink | None = None
    functions: Mapping[str, Function] | None = None
    seats: NodeAssignment | None = None
    labels: Mapping[str, str] | None = None
    on_loss: str = "warn"
    transport: TransportChoice = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.timings, Timings):
            raise refused("timings", self.timings, "Timings(…)")
        if self.on_event is not None:
            check_function("on_event", self.on_event, ["event"])
        if not isinstance(self.functions, Mapping | None):
            raise refused("functions", self.functions, "a mapping of names to functions")
        for name, function in (self.functions or {}).items():
            if not is_name(name):
                raise ConfigurationError(f"functions[{shown(name)}]: expected a name, as text")
            check_function(f"functions[{name!r}]", function, ["arrays"], more=True)
        if not isinstance(self.seats, NodeAssignment | None):
            raise refused("seats", self.seats, "the seats of an ExistingCluster")
        if not isinstance(self.labels, Mapping | None):
            raise refused("labels", self.labels, "a mapping of names to strings")
        for name, value in (self.labels or {}).items():
            allowed = isinstance(name, str) and _LABEL.fullmatch(name) and name not in _OWN_LABELS
            if not allowed or not isinstance(value, str):
                expected = "a text under a name of lower-case letters, digits and _, other than "
                raise refused(f"labels[{shown(name)}]", value, expected + ", ".join(_OWN_LABELS))
        one_of("on_loss", self.on_loss, ON_LOSS)
        one_of("transport", self.transport, TRANSPORTS)


@dataclass(frozen=True, slots=True)
class Start:
    """A group, and the state that it starts with."""

    group: Group
    run: Run  # its description, which is kept beside its checkpoints
    options: Options
    initial: tuple[np.ndarray, ...] = ()  # each shard's initial values; () if it resumes
    tables: tuple[dict[str, SparseTable], ...] = ()  # each shard's initial rows
    saved: Saved | None = None  # the checkpoints that it resumes from


def afresh(
    client: distributed.Client, params: Mapping[str, np.ndarray], choices: Choices, options: Options
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
    for table in layout.tables:
        if within(rule_for(rule, table.name), Accumulated) is not None:
            raise ConfigurationError(
                f"optimizer: Accumulated is for arrays, but {table.name!r} is a sparse table, and "
                "a gradient has only some of its rows"
            )
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
    run = Run(
        platform.token(),
        0,
        platform.clock.now(),
        layout,
        rule,
        choices.consistency,
        recovery,
        json.dumps(dict(choices.about)),
        filters,
        servers,
        pull_filters,
        checked_placement(choices.placement, servers),
    )
    initial = tuple(layout.gather(s, params)[0].copy() for s in range(len(layout.shards)))
    begun = tuple(dealt_out(layout, rows, rule)) if rows else ()
    return Start(_group(client, run, options), run, options, initial, begun)


def from_path(
    client: distributed.Client,
    path: str | PathLike[str],
    shards: int | None,
    servers: int | None,
    options: Options,
) -> Start:
    """Start from the newest checkpoints below a path: see `ParameterServer.resume`."""
    platform = platform_of(client)
    if shards is not None:
        shards = integer_argument("shards", shards, 1, "shards")
    saved = find_saved(shared_path(platform.place(as_path("path", path))))
    if shards is not None and shards != len(saved.states):
        saved = resharded(saved, shards)
    run = saved.run
    count = len(run.layout.shards)
    if servers is None and run.servers is not None:  # as before, but at most one for each replica
        servers = min(run.servers, count * run.recovery.durability.above.replicas)
    if servers is not None:
        servers = as_servers(servers, count, run.recovery)
    name, started, generation = platform.token(), platform.clock.now(), run.generation + 1
    run = replace(run, name=name, generation=generation, started=started, servers=servers)
    group = replace(_group(client, run, options), incarnations=saved.incarnations)
    return Start(group, run, options, saved=saved)


def _group(client: distributed.Client, run: Run, options: Options) -> Group:
    if options.functions:
        run.recovery.must_allow("functions")
    return Group(
        run.name,
        run.layout,
        run.rule,
        run.consistency,
        run.recovery,
        Endpoint(client.scheduler.address, COORDINATOR_PREFIX + run.name),
        timings=options.timings,
        recorded=options.on_event is not None,
        filters=run.filters,
        servers=run.servers,
        functions=dict(options.functions or {}),
        labels=dict(options.labels or {}),
        on_loss=options.on_loss,
        transport=platform_of(client).way(options.transport),
        pull_filters=run.pull_filters,
        placement=run.placement,
    )


def check_client(client: object) -> None:
    """Refuse what is not a connected Dask client."""
    from distributed import Client

    if not isinstance(client, Client) and platform_of(client) is SYSTEM:
        raise refused("client", client, "a Dask client: distributed.Client(cluster or address)")
    if getattr(client, "scheduler", None) is None:
        raise ConfigurationError("the Dask client is closed; expected a connected one")


def checked_recovery(recovery: object, platform: Platform = SYSTEM) -> Recovery:
    """Return a recovery, given as a preset's name or itself, with an absolute checkpoint path."""
    chosen = preset(recovery) if isinstance(recovery, str) else recovery
    if not isinstance(chosen, Recovery):
        raise refused("recovery", recovery, "a preset's name or Recovery(durability=..., ...)")
    if not chosen.durability.writes_checkpoints:
        return chosen
    return chosen.at(shared_path(platform.place(chosen.path)))
