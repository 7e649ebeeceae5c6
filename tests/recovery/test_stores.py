"""The state store and the mailboxes: fenced by epoch, in order, and nothing is forgotten early."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from dps.core.shard import ShardState
from dps.core.tables.table import Level, SparseTable
from dps.core.updates import Operation, UpdateId
from dps.errors import MailboxClosed, StaleEpoch, StoreUnavailable
from dps.protocol.messages import ClearMail, Deposit, GetState, PutSince, PutState, TakeMail
from dps.recovery.shared_store import Mailboxes, StateStore, without


def state(index: int) -> ShardState:
    return ShardState(index, index, index, np.zeros(8, np.uint8), {"m": np.zeros(8, np.uint8)})


def gradient(seq: int, worker: str = "a") -> Operation:
    return Operation("gradient", UpdateId(worker, 1, seq), gradient=np.zeros(8, np.uint8))


def test_a_server_that_was_replaced_can_neither_write_nor_read() -> None:
    store = StateStore()
    kept = state(5)
    store.put(PutState(0, 2, kept))
    store.get(GetState(0, 3))
    with pytest.raises(StaleEpoch, match="shard 0 is in epoch 3, not 2"):
        store.put(PutState(0, 2, state(6)))
    with pytest.raises(StaleEpoch, match="shard 0 is in epoch 3, not 2"):
        store.get(GetState(0, 2))
    assert store.get(GetState(0, 3)) is kept


def with_rows(index: int, *levels: Level) -> ShardState:
    return replace(state(index), tables={"emb": SparseTable(levels)} if levels else {})


OLD, NEW, NEWEST = (Level(np.array([i]), np.full((1, 2), float(i))) for i in (1, 2, 3))


@pytest.mark.parametrize(
    ("before", "after", "sent"),
    [
        (with_rows(1, OLD), with_rows(2, NEW, OLD), 1),
        (with_rows(1, NEW, OLD), with_rows(2, NEWEST), 1),
        (with_rows(1, OLD), with_rows(2, OLD), 0),
        (with_rows(1), with_rows(2, NEW, OLD), 2),
    ],
)
def test_only_the_levels_that_are_new_need_be_put(
    before: ShardState, after: ShardState, sent: int
) -> None:
    store = StateStore()
    store.put(PutState(0, 1, before))
    newer, kept = without(before, after)
    assert len(newer.tables["emb"].levels) == sent
    store.put_since(PutSince(0, 1, newer, before.index, kept))
    found = store.get(GetState(0, 1))
    assert found is not None
    assert [id(level) for level in found.tables["emb"].levels] == [
        id(level) for level in after.tables["emb"].levels
    ]
    assert found.index == after.index


@pytest.mark.parametrize("there", [None, (2, 4)])
def test_levels_are_not_put_on_another_state(there: tuple[int, int] | None) -> None:
    store, before = StateStore(), with_rows(4, OLD)
    if there is not None:
        store.put(PutState(0, there[0], with_rows(there[1], OLD)))
    newer, kept = without(before, with_rows(5, NEW, OLD))
    with pytest.raises(StoreUnavailable, match="index 4 of shard 0 is not here"):
        store.put_since(PutSince(0, 3, newer, 4, kept))
    store.get(GetState(0, 4))
    with pytest.raises(StaleEpoch):
        store.put_since(PutSince(0, 3, newer, 4, kept))


def filled(epoch: int, seqs: Iterable[int]) -> Mailboxes:
    mailboxes = Mailboxes()
    for seq in seqs:
        mailboxes.deposit(Deposit(0, epoch, gradient(seq)))
    return mailboxes


def seqs(mailboxes: Mailboxes, epoch: int) -> list[int]:
    return [op.id.seq for op in mailboxes.take(TakeMail(0, epoch))]


def clear(mailboxes: Mailboxes, epoch: int) -> None:
    mailboxes.clear(ClearMail(0, epoch))


def test_a_gradient_that_is_deposited_again_is_kept_once() -> None:
    mailboxes = filled(2, [1, 2, 1])
    mailboxes.deposit(Deposit(0, 3, gradient(2)))
    mailboxes.deposit(Deposit(0, 3, gradient(2, worker="b")))
    mail = mailboxes.take(TakeMail(0, 3))
    assert [op.id for op in mail] == [("a", 1, 1), ("a", 1, 2), ("b", 1, 2)]


def test_a_mailbox_is_closed_once_it_was_taken_until_the_shard_is_down_again() -> None:
    mailboxes = filled(2, [1])
    mailboxes.take(TakeMail(0, 2))
    for epoch in (1, 2):
        with pytest.raises(MailboxClosed, match=f"shard 0 is served again .epoch {epoch}"):
            mailboxes.deposit(Deposit(0, epoch, gradient(2)))
    mailboxes.deposit(Deposit(0, 3, gradient(2)))
    assert seqs(mailboxes, 3) == [1, 2]


def test_a_clear_that_comes_twice_or_late_forgets_nothing_that_came_since() -> None:
    mailboxes = filled(2, [1, 2])
    mailboxes.take(TakeMail(0, 2))
    clear(mailboxes, 2)
    for seq in (3, 4):
        mailboxes.deposit(Deposit(0, 3, gradient(seq)))
    assert seqs(mailboxes, 2) == []
    clear(mailboxes, 2)
    assert seqs(mailboxes, 3) == [3, 4]
