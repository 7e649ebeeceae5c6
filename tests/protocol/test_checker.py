"""The checks themselves: each of these deliberately broken variants of the protocol is caught."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest

from dps.core import shard
from dps.core.consistency import BSP, SSP
from dps.core.shard import ShardState
from dps.core.updates import Operation, UpdateId
from dps.protocol import replica
from dps.protocol.checkpoint import CheckpointFiles
from dps.protocol.commits import Commits
from dps.protocol.durability import Checkpoints
from dps.protocol.host import Host
from dps.protocol.messages import ClearMail, Install, Push, Pushed, TakeMail
from dps.protocol.replica import Replica
from dps.protocol.rounds import Rounds
from dps.protocol.store import StateStore
from dps.sim.counting import Violation
from tests.protocol import test_consistency as consistency
from tests.protocol.cases import CASES
from tests.protocol.schedules import simulate

SCHEDULES = 300

Break = Callable[[], AbstractContextManager[Any]]


# -- broken variants -------------------------------------------------------------------------------


async def ack_at_once(self: Replica, m: Push) -> Pushed:
    """Acknowledge an update before the successor or the durability has it."""
    self._must_be_head(m.epoch)
    step = await self._apply(m.operation, m.epoch)
    weights = await self._readable(m.operation.id.worker, replica._now()) if m.pull else None
    clock = step.state.workers[m.operation.id.worker].clock
    return Pushed(step.outcome, step.state.version, clock, weights)


async def install_without_table(self: Host, m: Install) -> Any:
    """Give a newcomer the weights, but not the dedupe table."""
    state = replace(m.state, workers={})
    return await install(self, replace(m, state=state))


def read_without_table(self: CheckpointFiles, found: Any) -> ShardState:
    """Restore the weights, but not the dedupe table."""
    return replace(read(self, found), workers={})


def never_a_duplicate(state: ShardState, update: UpdateId) -> bool:
    """Apply an update that is sent again a second time."""
    return False


async def clear_before_replay(self: Host, on: Replica, epoch: int) -> None:
    """Empty the mailbox before what was in it is durable."""
    mailbox = (await self._table()).mailbox
    if mailbox is not None and self._group.recovery.needs_store:
        take = TakeMail(on.shard, epoch)
        mail = await self._transport.call(mailbox, take, 1.0, "store")
        await self._transport.call(mailbox, ClearMail(on.shard, epoch), 1.0, "store")
        await on.replay(epoch, mail.operations)


async def leave_mail(self: Host, on: Replica, epoch: int) -> None:
    """Never apply what is in the mailbox."""


async def commit_regardless(self: Checkpoints, epoch: int, state: ShardState) -> None:
    """Write checkpoints in the background, and never wait for one that is overdue."""
    if state.version - self._complete >= self._due:
        self._start_writing(epoch, state)


async def read_uncommitted(self: Replica, worker: str, until: float) -> Any:
    """Serve weights that a failure may take back."""
    return replica.Weights(self.state.version, self._clock.now(), -1, self.state.values)


async def extend_without_the_last(self: Replica, m: Any) -> replica.Done:
    """Copy the state to a newcomer, but not what was applied during the copy."""
    state = self.state
    install = Install(self.shard, m.epoch, (*self.chain, m.host), state, "replica")
    await self._transport.call(m.host, install, 3.0, "replicate")
    self._commits.successor = m.host
    return replica.Done()


async def configure_and_forget(self: Replica, m: Any) -> replica.Done:
    """Enter a new epoch without what the old successor had not acknowledged."""
    self._commits._log.clear()
    return await configure(self, m)


def put_from_anyone(self: StateStore, m: Any) -> replica.Done:
    """Let a server that was replaced overwrite the state of the one that replaced it."""
    self._states[m.shard] = (m.epoch, m.state)
    return replica.Done()


async def replicate_from_anyone(self: Replica, m: Any) -> replica.Done:
    """Take operations from a head that was replaced."""
    return await replicate(self, replace(m, epoch=self.epoch))


async def skip_uncommitted(self: Commits, successor: Any, after: int) -> None:
    """Pass only the newest operation on."""
    await pass_on(self, successor, max(after, self._newest.index - 1))


async def keep_the_dead(self: Replica, epoch: int, update: UpdateId) -> None:
    """Leave lost workers in the clock table."""


def one_too_far(self: Replica, worker: str) -> bool:
    """Let a worker read that is one update further ahead than it may be."""
    left = self._slack(worker)
    return left is None or left >= -1


async def round_in_order_of_arrival(self: Rounds, complete: bool = False) -> None:
    """Apply a round's updates in the order in which they came."""
    if self._state().clocks.keys() <= self._held.keys():
        complete_round, self._held = self._held, {}
        for held in complete_round.values():
            held.step.set_result(await self._apply(held.operation))


def join_at_zero(layout: Any, rule: Any, state: ShardState, op: Operation) -> shard.Step:
    """Have a newcomer start at clock 0, far behind the others."""
    step: shard.Step = apply(layout, rule, state, op)
    if op.kind != "join" or step.outcome == "duplicate":
        return step
    progress = replace(step.state.workers[op.id.worker], clock=0)
    workers = {**step.state.workers, op.id.worker: progress}
    return replace(step, state=replace(step.state, workers=workers))


install, read, configure = Host._install, CheckpointFiles.read, Replica.configure
replicate, pass_on, apply = Replica.replicate, Commits.pass_on, shard.apply


def broken(target: Any, name: str, by: Any) -> Break:
    return lambda: patch.object(target, name, by)


@dataclass(frozen=True)
class Mutant:
    """A broken variant, the strategy whose schedules are to catch it, and what they must say."""

    breaks: Break
    case: str
    symptom: str


LOST = "acked updates are lost"
STUCK = "not served|come to rest|still running"

MUTANTS = {
    "ack before the successor": Mutant(broken(Replica, "push", ack_at_once), "chain(2)", LOST),
    "ack before the store": Mutant(broken(Replica, "push", ack_at_once), "stateless", LOST),
    "dedupe table not replicated": Mutant(
        broken(Host, "_install", install_without_table), "chain(2)", "differs from its head"
    ),
    "dedupe table not restored": Mutant(
        broken(CheckpointFiles, "read", read_without_table), "checkpoint", "the workers' updates"
    ),
    "sent again, applied again": Mutant(
        broken(shard, "is_duplicate", never_a_duplicate), "chain(2)", "more than once"
    ),
    "mailbox cleared before apply": Mutant(
        broken(Host, "_take_mail", clear_before_replay), "stateless", LOST
    ),
    "mailbox left": Mutant(broken(Host, "_take_mail", leave_mail), "stateless", LOST),
    "checkpoint ignores its bound": Mutant(
        broken(Checkpoints, "commit", commit_regardless), "checkpoint", LOST
    ),
    "uncommitted weights served": Mutant(
        broken(Replica, "_readable", read_uncommitted), "chain(2), busy", "was there, is gone"
    ),
    "last operations not copied": Mutant(
        broken(Replica, "extend", extend_without_the_last), "chain(2)", STUCK
    ),
    "lost on promotion": Mutant(
        broken(Replica, "configure", configure_and_forget), "chain(3)", STUCK
    ),
    "operations skipped": Mutant(broken(Commits, "pass_on", skip_uncommitted), "chain(2)", STUCK),
    "zombie's state stored": Mutant(broken(StateStore, "put", put_from_anyone), "stateless", LOST),
    "zombie's operations taken": Mutant(
        broken(Replica, "replicate", replicate_from_anyone), "chain(2)", LOST
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_schedules_catch(name: str) -> None:
    mutant = MUTANTS[name]
    with mutant.breaks():
        for seed in range(SCHEDULES):
            try:
                simulate(mutant.case, CASES[mutant.case], seed)
            except Violation as violation:
                if re.search(mutant.symptom, str(violation)):
                    return
    pytest.fail(f"{name}: not caught by {SCHEDULES} schedules of {mutant.case}")


@pytest.mark.parametrize(
    ("breaks", "check"),
    [
        pytest.param(
            broken(Replica, "_may_read", one_too_far),
            lambda: consistency.test_ssp_lets_nobody_read_who_is_too_far_ahead(False, 1),
            id="gate off by one",
        ),
        pytest.param(
            broken(Replica, "evict", keep_the_dead),
            lambda: consistency.test_a_worker_that_is_gone_holds_nobody_up(BSP(), "crashed"),
            id="dead workers waited for",
        ),
        pytest.param(
            broken(Rounds, "finish", round_in_order_of_arrival),
            lambda: consistency.test_bsp_is_the_sequential_computation_whatever_the_schedule(0),
            id="rounds in order of arrival",
        ),
        pytest.param(
            broken(replica, "apply", join_at_zero),
            lambda: consistency.test_a_worker_that_joins_starts_at_the_minimum(SSP(0)),
            id="newcomers start at zero",
        ),
    ],
)
def test_consistency_checks_catch(breaks: Break, check: Callable[[], None]) -> None:
    with breaks(), pytest.raises((AssertionError, TimeoutError)):
        check()
