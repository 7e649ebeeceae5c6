"""Key caching: lists that a node has had are left out, and sent again when it has them no more."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

import dps
from dps.core.filters.chain import checked
from dps.core.filters.encoding import taken_apart
from dps.core.filters.outbox import Outbox
from dps.core.outage import Continue
from dps.core.updates import Operation
from dps.errors import KeysUnknown, ShapeMismatch
from dps.protocol import key_cache as keys
from dps.protocol.client.key_cache import KnownKeys
from dps.protocol.compression import dense
from dps.protocol.durabilities.chain import Chain
from dps.protocol.messages import Push
from dps.protocol.recovery import Recovery
from dps.protocol.server.key_cache import KeyLists
from dps.protocol.server.shard_server import ShardServer
from dps.protocol.transport import Endpoint
from tests.support.builders import Model
from tests.support.worlds import Setting, in_world

SIZE = 4000
SOME = {"*": [dps.SignificantlyModified(0.0)]}  # sends what is not zero
HERE, THERE = Endpoint("a", "host"), Endpoint("b", "host")
MODEL = Model.of(w=np.zeros(SIZE))


def gradient(first: int) -> np.ndarray:
    found = np.zeros(SIZE)
    found[first : first + 800 : 4] = -1.0
    return found


def operation(first: int = 0, seq: int = 1) -> Operation:
    outbox = Outbox(MODEL.layout, 0, checked(SOME, ["w"], dps.SGD(1.0)))
    return outbox.prepared(MODEL.gradient("a", seq, of={"w": gradient(first)}), None).operation


def test_a_list_is_left_out_once_it_was_acknowledged_there() -> None:
    known, op = KnownKeys(), operation()
    assert known.shortened(op, HERE) is op
    known.acked(op, op, HERE)
    short = known.shortened(op, HERE)
    assert short.gradient.nbytes == op.gradient.nbytes - op.codec[0].key_bytes
    assert known.shortened(op, THERE) is op
    assert known.shortened(operation(1), HERE).codec == operation(1).codec
    known.acked(op, short, HERE)
    assert known.saved_bytes == op.codec[0].key_bytes > 300
    known.forget()
    assert known.shortened(op, HERE) is op


def test_what_one_node_has_had_is_not_left_out_for_another() -> None:
    """It would say so, and the operation be sent a second time, once for each list."""
    known = KnownKeys()
    known.acked(operation(0), operation(0), HERE)
    known.acked(operation(1), operation(1), THERE)
    assert known.shortened(operation(1), THERE).codec[0].cached
    assert known.shortened(operation(0), THERE).codec == operation(0).codec


def test_a_list_is_hashed_once_when_it_is_sent_and_once_at_most_when_that_is_acknowledged() -> None:
    known, op = KnownKeys(), operation()
    with patch.object(keys, "blake2b", wraps=keys.blake2b) as hashed:
        known.acked(op, op, HERE)
        assert hashed.call_count == 1
        short = known.shortened(op, HERE)
        assert hashed.call_count == 2
        known.acked(op, short, HERE)
        assert hashed.call_count == 2, "its digest is in what was sent"


def test_a_node_fills_in_what_it_has_had_from_anybody() -> None:
    lists, known = KeyLists(), KnownKeys()
    for first in (0, 1):
        op = operation(first)
        known.acked(op, op, HERE)
        assert lists.completed(op) is op
    for first in (1, 0):
        short = known.shortened(operation(first), HERE)
        assert short.codec[0].cached
        full = lists.completed(short)
        assert full.codec == operation(first).codec
        assert full.gradient.tobytes() == operation(first).gradient.tobytes()


def test_a_list_that_is_not_there_is_asked_for() -> None:
    known, op = KnownKeys(), operation()
    known.acked(op, op, HERE)
    short = known.shortened(op, HERE)
    with pytest.raises(KeysUnknown, match="send it again"):
        KeyLists().completed(short)
    with pytest.raises(ShapeMismatch):
        dense(MODEL.layout.shards[0], short)
    lists = KeyLists()
    lists.completed(op)
    wrong = replace(short, codec=(replace(short.codec[0], key_bytes=9),))
    with pytest.raises(ShapeMismatch, match="another length"):
        lists.completed(wrong)


def test_neither_end_keeps_lists_without_bound() -> None:
    nbytes = operation().codec[0].key_bytes
    lists = KeyLists()
    at_server = patch("dps.protocol.server.key_cache.CACHE_BYTES", 3 * nbytes)
    with at_server, patch("dps.protocol.client.key_cache.REMEMBERED", 3):
        known = KnownKeys()
        for first in range(4):
            lists.completed(operation(first))
            known.acked(operation(first), operation(first), HERE)
        assert known.shortened(operation(0), HERE).codec == operation(0).codec
    known = KnownKeys()
    for first, there in enumerate((False, True, True, True)):
        known.acked(operation(first), operation(first), HERE)
        short = known.shortened(operation(first), HERE)
        if there:
            assert lists.completed(short).codec == operation(first).codec
        else:
            with pytest.raises(KeysUnknown):
                lists.completed(short)


def test_short_lists_and_plain_gradients_are_left_as_they_are() -> None:
    known, lists = KnownKeys(), KeyLists()
    few = np.zeros(SIZE)
    few[:5] = 1.0
    outbox = Outbox(MODEL.layout, 0, checked(SOME, ["w"], dps.SGD(1.0)))
    op = outbox.prepared(MODEL.gradient("a", 1, of={"w": few}), None).operation
    for unchanged in (op, MODEL.gradient("a", 1)):
        known.acked(unchanged, unchanged, HERE)
        assert known.shortened(unchanged, HERE) is unchanged
        assert lists.completed(unchanged) is unchanged


def sent_lists(s: Setting) -> list[bool]:
    """For each push of a gradient that reaches a host from now on, whether its list is there."""
    found: list[bool] = []
    push = ShardServer._push

    async def watched(self: ShardServer, m: Push) -> object:
        if m.operation.kind == "gradient":
            found.append(all(section.keys.size for section in taken_apart(m.operation)))
        return await push(self, m)

    for host in s.world.hosts.values():
        host._services[Push] = lambda m, host=host: watched(host, m)
    return found


def test_only_the_first_of_equal_lists_travels_to_a_node() -> None:
    async def scenario(s: Setting) -> None:
        found = sent_lists(s)
        process, client = await s.enter("a")
        for _ in range(3):
            await process.run(client.push({"w": gradient(0)}, pull=True))
        assert found == [True, False, False]
        for host in s.world.hosts.values():
            host._keys = KeyLists()
        await process.run(client.push({"w": gradient(0)}))
        assert found[3:] == [False, True], "it was asked for, and sent with the same number"
        await process.run(client.push({"w": gradient(0)}))
        (state,) = await s.states()
        assert state.version == 5
        assert (state.values.view("float64") == -5 * gradient(0)).all()
        counts = client.filtered.counts
        one = operation().codec[0]
        assert counts.raw_bytes == 5 * 8 * SIZE
        assert counts.sent_bytes == 5 * one.value_bytes + 2 * one.key_bytes

    in_world(scenario, params={"w": np.zeros(SIZE)}, shards=1, filters=SOME)


@pytest.mark.parametrize("buffer", ["worker", "mailbox"])
def test_what_is_replicated_or_buffered_carries_its_lists(buffer: str) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        for _ in range(2):
            await process.run(client.push({"w": gradient(0)}, pull=True))
        s.world.crash("server-0", back_after=0.5)
        s.world.crash("replica-0-1", back_after=0.5)
        for _ in range(3):
            await process.run(client.push({"w": gradient(0)}, pull=True))
            await asyncio.sleep(0.05)
        await process.run(client.leave("finished"))
        (state,) = await s.states()
        found = s.world.states((await s.world.complete()).views[0])
        assert all(x.values.tobytes() == state.values.tobytes() for x in found)
        assert (state.values.view("float64") == -3 * gradient(0)).all(), "all copies were lost"

    recovery = Recovery(Chain(2), Continue(buffer=buffer))  # type: ignore[arg-type]
    in_world(scenario, params={"w": np.zeros(SIZE)}, shards=1, filters=SOME, recovery=recovery)
