"""Broken variants of replicated stores: acks without all, and copies counted on that are not there.

Like `dps.sim.broken.protocol`: each says what it leaves out in its docstring.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from dps.core.shard import ShardState
from dps.errors import TransportError
from dps.protocol.client.shard_client import ShardClient
from dps.protocol.coordinator.coordinator import Coordinator
from dps.protocol.coordinator.shard_controller import ShardController
from dps.protocol.durabilities.shared_store import StorePersistence
from dps.protocol.messages import Deposit, Keepers
from dps.protocol.server.replica import Replica
from dps.protocol.server.shard_server import ShardServer
from dps.protocol.transport import Endpoint
from dps.sim.broken.variant import (
    instead_of,
    mail_in_two_stores,
    mailboxes,
    stores,
    two_stores,
)


@instead_of(StorePersistence, "commit", "ack after one of two stores", two_stores)
async def _commit_to_any(self: StorePersistence, epoch: int, state: ShardState) -> None:
    """Acknowledge what one store has, and leave it to the others when they have it."""
    puts = [asyncio.ensure_future(self._keep(s, epoch, state)) for s in self._stores()]
    for put in puts:
        put.add_done_callback(lambda put: put.cancelled() or put.exception())
    done, _ = await asyncio.wait(puts, return_when=asyncio.FIRST_COMPLETED)
    for put in done:
        put.result()


@instead_of(StorePersistence, "begin", "new store counted before its copy is there", two_stores)
async def _begin_without(self: StorePersistence, epoch: int, state: ShardState) -> None:
    """Serve a shard with a new store that gets a state when there is an update."""


@instead_of(ShardController, "_keepers", "restored from the newest store", two_stores)
def _newest_first(self: ShardController) -> Keepers:
    """Begin with what the store has that came last, which may be nothing, or of long ago."""
    return Keepers(tuple(reversed(self._port.stores)), self._port.mailboxes, whole=1)


@instead_of(ShardController, "do_without", "store out of reach waited for", two_stores, wide=True)
def _never_without(self: ShardController, store: Endpoint) -> bool:
    """Have acks wait for a store for as long as the coordinator hears it."""
    return False


@instead_of(ShardController, "do_without", "last store let go as out of reach", two_stores, True)
def _without_any(self: ShardController, store: Endpoint) -> bool:
    """Do without a store that cannot be reached, also if no other one has the state."""
    return _do_without(self, store) or (store in self._stored and _let_go(self, store))


def _let_go(self: ShardController, store: Endpoint) -> bool:
    self.store_lost(store)
    self.unsettle()
    self.interrupt()
    self.wake()
    return True


@instead_of(ShardController, "_note_stored", "store out of reach counted on", two_stores, True)
def _note_all_stored(self: ShardController, keepers: Keepers) -> None:
    """Count on a store that the shard is served without as if it had the state."""
    self._stored = self._port.stores


@instead_of(ShardClient, "_deposit_in", "mail left in one of two mailboxes", mail_in_two_stores)
async def _deposit_in_one(
    self: ShardClient, mailboxes: Sequence[Endpoint], request: Deposit
) -> None:
    """Take a gradient for safe that one mailbox has."""
    await _deposit_in(self, mailboxes[:1], request)


@instead_of(ShardServer, "_take_mail", "mail left where it is out of reach", mailboxes)
async def _without_mail(self: ShardServer, replica: Replica, epoch: int) -> None:
    """Serve a shard without its mail if no mailbox can be reached."""
    with suppress(TransportError):
        await _take_mail(self, replica, epoch)


@instead_of(Coordinator, "came_to_rest", "no second mailbox after an outage", mail_in_two_stores)
async def _rest_as_it_is(self: Coordinator) -> None:
    """Leave out a mailbox that had to wait until every shard is served."""
    self.scaling.consider()
    if self.scaling.look():
        await self.publish()


@instead_of(
    Coordinator, "_not_replaced_by", "drained store let go before it is copied", stores, wide=True
)
def _none_left(self: Coordinator, stores: Sequence[Endpoint]) -> list[Endpoint]:
    """Count at once on the stores alone that take the place of a drained one."""
    return []


@instead_of(
    Coordinator, "_not_replaced_by", "drained store let go by the first shard", stores, wide=True
)
def _let_go_by_any(self: Coordinator, stores: Sequence[Endpoint]) -> list[Endpoint]:
    """Do without a drained store as soon as one shard's state is in the place of it."""
    copied = any(all(map(each.keeps_state_at, stores)) for each in self._controllers)
    return [] if stores and copied else _not_replaced_by(self, stores)


_deposit_in = ShardClient._deposit_in
_take_mail = ShardServer._take_mail
_do_without = ShardController.do_without
_not_replaced_by = Coordinator._not_replaced_by
