"""Workers' copies of a shard where pulls are filtered, and the changes that update them.

A replica keeps, for each worker that reads from it, the copy that it sent last: the same bits that
the worker has, if the reply arrived. Each request names the copy that the worker has. If that is
not the one that is kept here (a reply was lost, another replica sent it, there was no room for it,
the worker restarted), the worker gets all weights. So nothing here has to survive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import count

import numpy as np

from dps.core.blocks import ShardLayout
from dps.core.filters.chain import PLAIN, FilterChain
from dps.core.filters.encoding import assembled, stretches
from dps.core.filters.filter import Sending
from dps.core.updates import Operation, UpdateId
from dps.protocol.compression import packed, updated, without_lists
from dps.protocol.executor import offload
from dps.protocol.messages import CopyId, Weights

KEPT_BYTES = 1 << 30  # of a shard, for all workers; the copy that was not read for longest goes
PASSES = 4  # passes over the weights to find what has changed


@dataclass(frozen=True, slots=True)
class _Sent:
    """The copy that was sent to a worker by `pulls` changes; `lists` are the last ones' digests."""

    id: CopyId
    values: np.ndarray
    pulls: int
    lists: tuple[str, ...]


class SentCopies:
    """The copies that a replica has sent to workers. Used from one event loop."""

    def __init__(
        self, layout: ShardLayout, shard: int, chains: Mapping[str, FilterChain], holder: str
    ) -> None:
        self._layout = layout
        self._shard = shard
        self._chains = chains  # of arrays with filters; without any, nothing is kept
        # Unique in the group, and short, because it is in each request.
        self._holder = blake2b(holder.encode(), digest_size=8).hexdigest()
        self._numbers = count(1)
        self._sent: OrderedDict[str, _Sent] = OrderedDict()

    async def filtered(self, whole: Weights, reader: UpdateId, has: CopyId | None) -> Weights:
        """Return the reply to a worker that `has` a copy; a reader without a name gets `whole`."""
        if not self._chains or not reader.worker:
            return whole
        name = CopyId(self._holder, next(self._numbers))
        known = self._found(reader.worker, has)
        if known is None:
            reply, sent = replace(whole, copy=name), _Sent(name, whole.values, 0, ())
        else:
            work = partial(self._changes, known, whole, name, reader)
            reply, sent = await offload(work, PASSES * whole.values.nbytes)
        self._keep(reader.worker, sent)
        return reply

    def forget(self, worker: str) -> None:
        """Keep nothing for a worker that has left."""
        self._sent.pop(worker, None)

    def _found(self, worker: str, has: CopyId | None) -> _Sent | None:
        known = self._sent.get(worker)
        return known if known is not None and known.id == has else None

    def _keep(self, worker: str, sent: _Sent) -> None:
        self._sent[worker] = sent
        self._sent.move_to_end(worker)
        while sum(each.values.nbytes for each in self._sent.values()) > KEPT_BYTES:
            self._sent.popitem(last=False)

    def _changes(
        self, known: _Sent, whole: Weights, name: CopyId, reader: UpdateId
    ) -> tuple[Weights, _Sent]:
        number = reader._replace(seq=name.number)
        op = Operation("gradient", number)
        sections, lossless = [], []
        for stretch in stretches(self._layout, ()):
            chain = self._chains.get(stretch.name, PLAIN)
            values, copy = stretch.view(whole.values), stretch.view(known.values)
            sending = Sending(number, self._shard, stretch.name, known.pulls + 1, copy)
            sections.append(chain.changed(values, copy, sending))
            lossless.append(chain.lossless)
        op = packed(assembled(op, sections), lossless)
        values = updated(self._layout, known.values, op)
        op, lists = without_lists(op, known.lists)
        assert op.gradient is not None
        reply = replace(whole, values=op.gradient, copy=name, since=known.id, codec=op.codec)
        return reply, _Sent(name, values, known.pulls + 1, lists)
