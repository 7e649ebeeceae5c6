"""The broken variants of what updates carry: rows of sparse tables, and filtered gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dps.core import replay
from dps.core.filters.chain import FilterChain
from dps.core.filters.outbox import Outbox, Prepared
from dps.core.shard import ShardState
from dps.core.updates import Operation
from dps.protocol.client.client import Client
from dps.protocol.client.encoder import Encoder
from dps.protocol.messages import (
    Done,
    Install,
    PutState,
)
from dps.protocol.server.copies import SentCopies
from dps.protocol.server.key_cache import KeyLists
from dps.protocol.server.replica import Replica
from dps.protocol.server.shard_server import ShardServer
from dps.protocol.storage import checkpoint_files as files
from dps.protocol.storage.state_store import StateStore
from dps.sim.broken.variant import (
    chains,
    checkpoints,
    filters,
    filters_buffered,
    filters_resent,
    instead_of,
    pull_filters,
    stores,
    sums,
)

# -- sparse tables ---------------------------------------------------------------------------------


@instead_of(ShardServer, "_install", "tables not replicated", chains)
async def _install_without_tables(self: ShardServer, m: Install) -> Any:
    """Give a newcomer the weights, but not the rows of sparse tables."""
    return await _install(self, replace(m, state=replace(m.state, tables={})))


@instead_of(files, "_arrays", "tables left out of checkpoints", checkpoints)
def _arrays_without_new_rows(state: ShardState) -> Any:
    """Write the rows of the oldest level of a table alone."""
    tables = {n: replace(t, levels=t.levels[-1:] * len(t.levels)) for n, t in state.tables.items()}
    return _arrays(replace(state, tables=tables))


@instead_of(StateStore, "put", "tables left out of the store", stores)
def _put_without_tables(self: StateStore, m: PutState) -> Done:
    """Keep the weights of a state, but no rows."""
    return _put(self, replace(m, state=replace(m.state, tables={})))


@instead_of(replay, "added", "rows of summed updates forgotten", sums)
def _rows_of_the_first(a: Any, b: Any) -> Any:
    """Sum the gradients of dense arrays, but take the rows of the first alone."""
    return a


# -- filters ---------------------------------------------------------------------------------------


@instead_of(Encoder, "operations", "filtered again when sent again", filters_resent)
async def _filter_each_time(
    self: Encoder, operation: Operation, parts: Any, point: Any
) -> Callable[[int], Operation]:
    """Put a gradient through its filters whenever it is sent."""
    return lambda shard: self._committed(self._prepared(operation, parts, point))[shard]


@instead_of(FilterChain, "filtered", "residual dropped", filters)
def _forget_residual(self: FilterChain, gradient: Any, residual: Any, sending: Any) -> Any:
    """Leave out of a gradient what was withheld before."""
    return _filtered(self, gradient, None, sending)


@instead_of(Outbox, "commit", "residual kept when it is sent", filters)
def _commit_and_keep(self: Outbox, prepared: Prepared, sent_bytes: int) -> None:
    """Keep what was withheld before, though it has been sent now."""
    before = dict(self._residuals)
    _commit(self, prepared, sent_bytes)
    for name, kept in before.items():
        if not self._residuals[name].any():
            self._residuals[name] = kept


@instead_of(Client, "_push_withheld", "residual lost on leaving", filters)
async def _leave_with_it(self: Client) -> None:
    """Leave without sending what is withheld."""


@instead_of(KeyLists, "_found", "list of indices of another worker", filters)
def _any_list(self: KeyLists, digest: str) -> Any:
    """Take the list that came last for the one that is meant."""
    return next(reversed(self._lists.values()), None)


@instead_of(KeyLists, "completed", "list of indices not filled in", filters)
def _leave_lists_out(self: KeyLists, op: Operation) -> Operation:
    """Pass an operation on without the list that it counts on."""
    return op


@instead_of(Replica, "summable", "encoded gradients summed", filters_buffered, raises=True)
def _sum_encoded(self: Replica, op: Operation) -> Operation:
    """Sum buffered gradients as they travel, without decoding them."""
    return op


# -- filtered pulls --------------------------------------------------------------------------------


@instead_of(SentCopies, "_found", "copy of another replica", pull_filters)
def _whoever_sent_it(self: SentCopies, worker: str, has: Any) -> Any:
    """Take what a worker has from another replica for what it was sent here."""
    known = self._sent.get(worker)
    return replace(known, id=has) if known is not None and has is not None else None


@instead_of(SentCopies, "_keep", "what is sent not kept", pull_filters)
def _keep_the_first(self: SentCopies, worker: str, sent: Any) -> None:
    """Keep the weights that a worker was sent at first, under the name of what it has."""
    before = self._sent.get(worker)
    _keep(self, worker, replace(sent, values=before.values) if before is not None else sent)


_install, _put = ShardServer._install, StateStore.put
_filtered, _commit = FilterChain.filtered, Outbox.commit
_arrays, _keep = files._arrays, SentCopies._keep
