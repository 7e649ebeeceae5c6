"""What the checker takes for broken, and what not, where no random schedule shows it.

One broken variant shows only in the last bit of the weights, which no counter has. All others are
caught by random schedules (`tests/sim/test_mutants.py`).
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock, patch

import numpy as np
import pytest

from dps.core.shard import initial_state
from dps.core.updates import Operation, UpdateId
from dps.events import Restored
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.durabilities.worker_cache import CopyOffers, WorkerCache
from dps.protocol.messages import Configure, Deposit, Drain, Install, Loss, ReplayBuffered
from dps.protocol.recovery import Recovery
from dps.protocol.server.batching import Batching
from dps.sim.checks.audit import Auditor, accepting, publishing
from dps.sim.injector import Injector
from dps.sim.schedules.strategies import CASES
from dps.sim.violation import Violation
from dps.sim.workload.counter import Tally
from dps.sim.workload.shapes import name_of
from dps.sim.world import COORDINATOR
from tests.protocol.coordinator.test_membership import view_of
from tests.protocol.server import test_consistency as consistency
from tests.support.worlds import Setting, happened, in_world, until


async def round_in_order_of_arrival(self: Batching, complete: bool = False) -> None:
    """Apply a round's updates in the order in which they came."""
    if self._replica.state.clocks.keys() <= self._held.keys():
        complete_round, self._held = self._held, {}
        for held in complete_round.values():
            held.step.set_result(await self._replica.apply_now(held.operation))


def test_rounds_in_order_of_arrival_are_noticed() -> None:
    with (
        patch.object(Batching, "finish", round_in_order_of_arrival),
        pytest.raises((AssertionError, TimeoutError)),
    ):
        consistency.test_bsp_is_the_sequential_computation_whatever_the_schedule(0)


def test_a_shard_that_starts_anew_is_told_from_an_attempt_that_comes_late() -> None:
    """A host gets what it was sent for an epoch that is over; then the shard starts anew."""

    async def scenario(s: Setting) -> None:
        untouched = Mock(spec=Injector, touched=lambda process: False)
        Auditor(s.world, CASES["worker cache"], Tally(1, lambda: False), untouched)
        restored = len(happened(s, Restored))
        s.world.crash("server-0")
        await until(lambda: len(happened(s, Restored)) == restored + 1)
        view = await view_of(s)
        assert [s.world.name_of(member) for member in view.chain] == ["spare-0"]

        await s.world.bring_up(["server-0"])
        host = s.world.endpoint("server-0")
        state = initial_state(params[name_of(0)].view(np.uint8), s.world.group.rule)
        await s.ask(host, Install(0, view.epoch - 1, (host,), state, "initial"))
        assert len(happened(s, Restored)) == restored + 2
        assert not s.network.broken.done()
        assert await view_of(s) == view

        # Now the coordinator is made to forget who has the shard, and has it restored elsewhere.
        controller = s.world._coordinator._controllers[0]
        controller.unsettle(without=view.chain[0])
        controller.wake()
        assert "spare-0 had its state" in str(await s.network.broken)

    params = {name_of(0): np.zeros(9)}
    in_world(scenario, params=params, shards=1, recovery=Recovery(WorkerCache()), extra=["spare-0"])


@pytest.mark.parametrize(("damaged", "most"), [(0, 4), (1, 4 + 4 + 3), (2, 4 + 2 * (4 + 3))])
def test_what_was_under_way_may_be_lost_with_a_damaged_checkpoint_only(
    damaged: int, most: int
) -> None:
    """Three workers push, and a checkpoint is written every 4 updates."""
    tally, untold = Tally(1, lambda: False), Mock(struck={"torn write": 0, "bit flip": damaged})
    world = Mock()
    world.group.restores_together = False
    auditor = Auditor(world, replace(CASES["checkpoint, BSP"], shards=1), tally, untold)
    tally.processes.update(["worker-0", "worker-1", "worker-2"])
    for number in range(damaged):
        auditor._refused(0, f"checkpoint {number}", "a bit flipped")
    bound = auditor._bound(auditor._shards[0])
    tally.acked[0] = set(range(most + 1))
    with pytest.raises(Violation, match="acked updates are lost"):
        auditor._check_loss("shard 0", 0, set(), bound)
    auditor._check_loss("shard 0", 0, {0}, bound)


@pytest.mark.parametrize(("based_on", "there", "known"), [(1, {0, 1}, 2), (3, {1}, 1)])
def test_what_was_acked_anew_is_reported_though_an_older_copy_has_it(
    based_on: int, there: set[int], known: int
) -> None:
    """Update 0 is lost; 1 was lost unacked, and sent again. A copy of before has both."""
    tally, losses = Tally(1, lambda: False), Mock(restorations=[Mock(shard=0, epoch=3)])
    case = replace(CASES["worker cache"], shards=1)
    auditor = Auditor(Mock(losses=losses), case, tally, Mock(spec=Injector))
    for epoch, of_epoch, acked, brought in [(3, 1, {0}, set()), (5, based_on, {0, 1}, there)]:
        tally.acked[0] = acked
        event = Restored(0.0, 0, epoch, "server-0", len(brought), "worker")
        auditor._note_restoration(event, of_epoch, brought)

    losses.found = [Loss(0, 0.0, known, True, "worker", 0, 3)]
    auditor._check_told(0, there)
    losses.found.append(Loss(0, 0.0, 1, True, "worker", 0, 5))
    with pytest.raises(Violation, match="were reported"):
        auditor._check_told(0, there)


@pytest.mark.parametrize(("acked_since", "most"), [({0, 1}, 3), ({0, 20}, 2)])
def test_what_came_back_is_reported_again_if_its_worker_was_told_of_more(
    acked_since: set[int], most: int
) -> None:
    """Update 0 is lost, and back with a copy of before; then the shard is lost once more."""
    served = [Mock(shard=0, epoch=3), Mock(shard=0, epoch=5)]
    tally, losses = Tally(1, lambda: False), Mock(restorations=served)
    case = replace(CASES["worker cache"], shards=1)
    auditor = Auditor(Mock(losses=losses), case, tally, Mock(spec=Injector))
    for epoch, acked, there in [(3, {0}, set()), (5, {0}, {0}), (7, acked_since, {0})]:
        tally.acked[0] = acked
        event = Restored(0.0, 0, epoch, "server-0", len(there), "worker")
        auditor._note_restoration(event, 1, there)

    losses.found = [Loss(0, 0.0, most, True, "worker", 0, 7)]
    auditor._check_told(0, {0})
    losses.found.append(Loss(0, 0.0, 1, True, "worker", 0, 8))
    with pytest.raises(Violation, match="were reported"):
        auditor._check_told(0, {0})


@pytest.mark.parametrize("came", ["nothing", "mail", "mail that is kept", "in use"])
def test_a_host_that_never_served_the_initial_values_has_no_state_to_go_on_from(came: str) -> None:
    """With server and store lost a shard starts anew; that is given up, and tried elsewhere."""

    async def listen(s: Setting) -> None:
        lost = Mock(
            spec=Injector, touched=lambda process: False, has_touched_all=lambda hosts: True
        )
        Auditor(s.world, replace(CASES["stateless"], shards=1), Tally(1, lambda: False), lost)

    async def scenario(s: Setting) -> None:
        restored, spare = len(happened(s, Restored)), s.world.endpoint("spare-0")
        answered = s.held_back(spare, lambda m: isinstance(m, Install) and came != "in use")
        s.world.crash("store-0", back_after=0.1)
        s.world.crash("server-0")
        await until(lambda: len(happened(s, Restored)) == restored + 1)
        if came.startswith("mail"):
            gradient = Operation(
                "gradient", UpdateId("worker-0", 1, 1), gradient=np.zeros(72, np.uint8)
            )
            await s.ask(spare, ReplayBuffered(0, s.world.view(0).epoch, (gradient,)))
            if came == "mail that is kept":
                (mailbox,) = s.world.table.mailboxes
                await s.ask(mailbox, Deposit(0, s.world.view(0).epoch + 1, gradient))
        elif came == "in use":
            await s.world.complete()
        await s.world.bring_up(["server-0"])

        controller = s.world._coordinator._controllers[0]
        if came == "in use":  # the coordinator is made to forget who has the shard
            controller.store_lost(s.world.table.stores[0])
            controller.unsettle(without=spare)
        controller.interrupt()
        controller.wake()
        await until(lambda: happened(s, Restored)[-1].node == "server-0")
        answered.set()
        broken = s.network.broken
        assert broken.done() == (came in ("mail", "in use"))
        assert not broken.done() or "spare-0 had its state" in str(broken.result())

    params = {name_of(0): np.zeros(9)}
    what = {"recovery": Recovery(SharedStore()), "extra": ["spare-0"], "meanwhile": listen}
    in_world(scenario, params=params, shards=1, **what)


def test_mail_may_be_lost_with_the_store_s_host_once_that_is_the_mailbox() -> None:
    async def scenario(s: Setting) -> None:
        store = s.world.endpoint("store-0").address
        injector = Mock(spec=Injector, has_touched_all=lambda hosts: hosts == {store})
        case = replace(CASES["stateless"], shards=1)
        auditor = Auditor(s.world, case, Tally(1, lambda: False), injector)
        with publishing(auditor.published):
            await s.world.bring_up(["spare-0"])
            assert not auditor.mail_lost
            await s.ask(COORDINATOR, Drain(s.world.endpoint("mailbox-0")))
            assert auditor.mail_lost

    params, recovery = {name_of(0): np.zeros(9)}, CASES["stateless"].recovery
    in_world(scenario, params=params, shards=1, recovery=recovery, extra=["mailbox-0"])


@pytest.mark.parametrize("another", [True, False])
def test_a_worker_s_copy_that_was_never_served_is_no_state_to_go_on_from(another: bool) -> None:
    """The donor is lost when it has installed it; who else has a copy must be asked for that."""

    async def listen(s: Setting) -> None:
        untouched = Mock(spec=Injector, touched=lambda process: False)
        case = replace(CASES["worker cache"], shards=1)
        auditors.append(Auditor(s.world, case, Tally(1, lambda: False), untouched))

    async def ignored(self: CopyOffers, shard: int) -> None: ...

    async def scenario(s: Setting) -> None:
        restored, spare = len(happened(s, Restored)), s.world.endpoint("spare-0")
        s.held_back(spare, lambda m: isinstance(m, Install))
        with accepting(auditors[0].accepted):
            for name in ("worker-0", "worker-1"):
                _, client = await s.enter(name)
                if another or name == "worker-1":
                    await client.pull()
        s.world.crash("server-0", back_after=0.1)
        await until(lambda: len(happened(s, Restored)) == restored + 1)
        assert happened(s, Restored)[-1].source == "worker"
        with patch.object(CopyOffers, "best", ignored if another else CopyOffers.best):
            s.world.crash("worker-1")
            await until(lambda: happened(s, Restored)[-1].node == "server-0")
        assert happened(s, Restored)[-1].source == "initial"
        broken = s.network.broken
        assert broken.done() == another
        assert not another or ": worker-0 had its state" in str(broken.result())

    auditors: list[Auditor] = []
    params = {name_of(0): np.zeros(9)}
    what = {"recovery": Recovery(WorkerCache()), "extra": ["spare-0"], "meanwhile": listen}
    in_world(scenario, params=params, shards=1, **what)


@pytest.mark.parametrize("served", [True, False])
def test_who_has_stopped_for_a_move_counts_until_others_serve(served: bool) -> None:
    """The newcomer is lost before it serves, then the rest, and the shard starts anew."""

    async def listen(s: Setting) -> None:
        untouched, case = Mock(spec=Injector, touched=lambda process: False), CASES["chain(2)"]
        auditors.append(
            Auditor(s.world, replace(case, shards=1), Tally(1, lambda: False), untouched)
        )

    async def scenario(s: Setting) -> None:
        goes, stays = (s.world.endpoint(name) for name in ("server-1", "server-0"))
        entered = s.held_back(stays, lambda m: isinstance(m, Configure) and goes not in m.chain)
        with publishing(auditors[0].published):
            await s.ask(COORDINATOR, Drain(goes))
            replica = s.world.hosts[goes.address].replica(0)
            await until(lambda: goes not in replica.chain)
            assert goes in s.world.view(0).chain
            if not served:  # the coordinator is made to forget that it has to come back
                s.world._coordinator._controllers[0].unsettle(without=goes)
            s.world.crash("server-2")
            if served:
                await until(lambda: s.world.view(0).chain == (stays, goes))
                entered.set()
                await until(lambda: s.world.view(0).chain == (stays,) and s.world.view(0).serving)
            s.world.crash("server-0")
            await s.world.bring_up(["server-3"])
            await until(lambda: happened(s, Restored)[-1].node == "server-3")
        broken = s.network.broken
        assert broken.done() != served
        assert served or "server-1 had its state" in str(broken.result())

    auditors: list[Auditor] = []
    params, what = {name_of(0): np.zeros(9)}, {"recovery": Recovery(Chain(2)), "servers": 2}
    in_world(scenario, params=params, shards=1, extra=["server-2"], meanwhile=listen, **what)


@pytest.mark.parametrize("leave_hosts", [True, False])
def test_all_workers_of_a_group_end_with_it(leave_hosts: bool) -> None:
    """Else one that is left pushes to hosts of its own group, of which the next one has nothing."""

    async def scenario(s: Setting) -> None:
        workers = [(await s.enter(name))[0] for name in ("worker-0", "worker-0", "worker-1")]
        hosts = [s.world.process(name) for name in ("server-0", "server-1")]
        s.world.end(leave_hosts)
        assert not any(process.alive for process in workers)
        assert all(host is not None and host.alive == leave_hosts for host in hosts)

    in_world(scenario)


def test_a_worker_takes_part_without_a_break_until_the_next_of_its_name_is_let_in() -> None:
    tally = Tally(1, lambda: False)
    tally.joined["worker-0"] = 1
    tally.entered("worker-0", 1)
    assert tally.has_part("worker-0", 1)
    tally.joined["worker-0"] = 2
    assert not tally.has_part("worker-0", 1)
    tally.entered("worker-0", 2)
    assert tally.has_part("worker-0", 2)
    tally.left("worker-0", 2)
    assert not tally.has_part("worker-0", 2)


def test_an_earlier_process_of_a_name_does_not_outlast_the_later_one() -> None:
    tally = Tally(1, lambda: False)
    tally.entered("worker-0", 1)
    tally.left("worker-0", 3)
    tally.entered("worker-0", 2)
    assert not tally.active
    tally.entered("worker-0", 4)
    assert tally.active.keys() == {"worker-0"}
