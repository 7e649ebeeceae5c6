"""Shards that move between hosts while workers push: who holds them, and what a loss costs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from dps.core.consistency import BSP, Consistency
from dps.core.outage import Continue
from dps.errors import CapacityError, ConfigurationError
from dps.events import Event, Moved, Promoted, ReplicaAdded, Restored
from dps.protocol.client.client import Client
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.durabilities.worker_cache import WorkerCache
from dps.protocol.durability import NoDurability
from dps.protocol.messages import Dismiss, Drain, Install, ReportLink, Scale, Table
from dps.protocol.recovery import Recovery
from dps.sim.disk import SCHEME, disk
from dps.sim.process import Process
from dps.sim.world import COORDINATOR
from tests.support.worlds import Setting, in_world, until

PARAMS = {f"w{i}": np.zeros(30 + i) for i in range(6)}
ONES = {name: -np.ones_like(values) for name, values in PARAMS.items()}
MORE = ("server-2", "server-3")


def loads(s: Setting, table: Table) -> dict[str, int]:
    """How many replicas are on each node that has any."""
    return Counter(s.world.name_of(member) for view in table.views for member in view.chain)


def moves(s: Setting) -> list[Moved]:
    return [event for _, event in s.world.events if isinstance(event, Moved)]


async def counted(s: Setting, pushed: int) -> None:
    """Every weight counts the updates that it has seen."""
    _, reader = s.world.client("reader")
    await reader.pull()
    assert all((values == pushed).all() for values in reader.weights().values())


class Pusher:
    """A worker that pushes without a pause until it is told to stop."""

    def __init__(self, process: Process, client: Client) -> None:
        self.pushed = 0
        self._client = client
        self._over = False
        self._task = process.run(self._push())

    async def _push(self) -> None:
        while not self._over:
            await self._client.push(ONES, pull=True)
            self.pushed += 1
        await self._client.leave("finished")

    async def stopped(self) -> int:
        self._over = True
        await self._task
        return self.pushed


@pytest.mark.slow
@pytest.mark.parametrize(
    "recovery",
    [
        Recovery(NoDurability()),
        Recovery(Checkpoint(every=5, path=f"{SCHEME}://scaling/none")),
        Recovery(Chain(2)),
        Recovery(SharedStore(every=4)),
        Recovery(SharedStore(every=4), Continue()),
        Recovery(WorkerCache()),
    ],
    ids=lambda recovery: f"{recovery.durability}"[:40],
)
@pytest.mark.parametrize("consistency", [None, BSP()], ids=["ASP", "BSP"])
def test_replicas_move_while_workers_push_and_every_update_counts_once(
    recovery: Recovery, consistency: Consistency | None
) -> None:
    async def scenario(s: Setting) -> None:
        workers = [Pusher(*await s.enter(f"worker-{i}")) for i in range(2)]
        replicas = s.world.group.replicas
        for servers in (4, 3, 2):
            found = loads(s, await s.scaled(Scale(servers)))
            assert len(found) == servers
            assert max(found.values()) - min(found.values()) <= 1
        await counted(s, sum(await asyncio.gather(*(worker.stopped() for worker in workers))))
        fewest = {1: 2 + 1 + 2, 2: 6 + 3 + 4}[replicas]
        assert fewest <= len(moves(s)) <= fewest + 3 * (replicas - 1)
        held = sum(len(host.states()) for host in s.world.hosts.values())
        assert held == 6 * replicas, "who gave a replica away has forgotten it"

    files = disk("scaling")
    try:
        how = {"consistency": consistency} if consistency is not None else {}
        in_world(scenario, params=PARAMS, shards=6, servers=2, extra=MORE, recovery=recovery, **how)
    finally:
        files.erase()


def test_nobody_moves_anything_unless_asked() -> None:
    async def scenario(s: Setting) -> None:
        await asyncio.sleep(5.0)
        assert not moves(s)
        assert not (await s.world.complete()).leaving

    in_world(scenario, shards=2, extra=("spare-0", "spare-1"))


def test_a_move_that_is_under_way_is_not_replaced_by_another() -> None:
    """Its newcomer would stay where it is: in a chain that is longer than wanted, for ever."""

    async def scenario(s: Setting) -> None:
        target = s.world.endpoint("spare-0")
        copied = s.held_back(target, lambda message: isinstance(message, Install))
        await s.ask(COORDINATOR, Scale(2))
        await until(lambda: s.world.hosts[target.address].states())
        draining = asyncio.ensure_future(s.scaled(Drain(target)))
        await asyncio.sleep(0.1)
        copied.set()
        (table,) = await s.all_of(draining, within=10.0)
        chains = [[s.world.name_of(host) for host in view.chain] for view in table.views]
        assert sorted(chains) == [["server-0"], ["spare-1"]]

    in_world(scenario, shards=2, servers=1, extra=("spare-0", "spare-1"))


# -- losses in the midst of a move -----------------------------------------------------------------


def lost_when(s: Setting, kind: type[Event], name: str) -> list[str]:
    """Crash a node as soon as an event of this kind is recorded for the first time from now on."""
    lost: list[str] = []

    def watch(process: Process, event: Event) -> None:
        if isinstance(event, kind) and not lost:
            lost.append(process.name)
            s.world.crash(name)

    s.world.watchers.append(watch)
    return lost


def restored(s: Setting) -> list[Restored]:
    """Shards that had to be brought back."""
    return [e for _, e in s.world.events if isinstance(e, Restored) and e.epoch > 1]


def test_the_loss_of_the_old_holder_after_the_copy_costs_nothing() -> None:
    """Even with no durability: the newcomer has acknowledged everything."""

    async def scenario(s: Setting) -> None:
        worker = Pusher(*await s.enter("worker-0"))
        await asyncio.sleep(0.2)
        newcomers = lost_when(s, ReplicaAdded, "server-1")
        await s.scaled(Scale(1))
        assert newcomers == ["server-0"]
        assert not restored(s)
        await counted(s, await worker.stopped())

    in_world(scenario, params=PARAMS, shards=2, servers=2, extra=("server-2",))


def test_the_loss_of_the_newcomer_before_it_serves_costs_nothing() -> None:
    async def scenario(s: Setting) -> None:
        worker = Pusher(*await s.enter("worker-0"))
        await asyncio.sleep(0.2)
        newcomers = lost_when(s, Promoted, "server-1")
        await s.scaled(Scale(2))
        assert newcomers == ["server-1"]
        assert not restored(s)
        await counted(s, await worker.stopped())

    in_world(scenario, params=PARAMS, shards=2, servers=1, extra=("server-1", "server-2"))


@pytest.mark.slow
def test_an_interrupted_move_goes_on_without_who_has_stopped() -> None:
    """The others may have committed what it lacks, and could pass nothing on to it."""

    async def scenario(s: Setting) -> None:
        pushers = [Pusher(*await s.enter(f"worker-{i}")) for i in range(3)]
        (controller,) = s.world._coordinator._controllers
        replies: list[str] = []

        def interrupt() -> None:
            controller.unsettle()
            controller.interrupt()
            s.world.crash("server-2", back_after=0.3)

        def watch(what: str, source: str, target: str, message: str) -> None:
            if (what, message) == ("sent", "Configure reply"):
                replies.append(source)
                if len(replies) == 6:  # three with the newcomer, and the old holder, and the others
                    # The head goes on with what it has; that it does is not known yet.
                    asyncio.get_running_loop().call_later(0.04, interrupt)

        await asyncio.sleep(0.2)
        s.network.slow("server-0", "scheduler", 0.1)
        s.network.watchers.append(watch)
        await s.ask(COORDINATOR, Drain(s.world.endpoint("server-1")))
        await until(lambda: len(replies) > 6, within=5.0)
        async with asyncio.timeout(5.0):
            table = await s.world.complete()
        assert loads(s, table) == {"server-0": 1, "server-2": 1}
        done = sum([await pusher.stopped() for pusher in pushers])
        await counted(s, done)

    for seed in range(5):
        in_world(
            scenario,
            seed=seed,
            params=PARAMS,
            shards=1,
            recovery=Recovery(Chain(2)),
            servers=2,
            extra=("server-2",),
        )


# -- nodes that are taken out of use ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("recovery", [Recovery(), Recovery(Chain(2))])
def test_a_node_that_is_drained_can_be_shut_down(recovery: Recovery) -> None:
    async def scenario(s: Setting) -> None:
        worker = Pusher(*await s.enter("worker-0"))
        host = s.world.endpoint("server-0")
        table = await s.scaled(Drain(host))
        assert "server-0" not in loads(s, table)
        s.world.crash("server-0")
        await asyncio.sleep(1.0)
        assert not restored(s)
        await counted(s, await worker.stopped())

    in_world(scenario, params=PARAMS, shards=2, recovery=recovery, extra=("spare-0",))


def test_what_was_acked_before_a_move_is_saved_in_time() -> None:
    """Though no update follows that would have the new holder write it."""

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        await client.push(ONES)
        before = asyncio.get_running_loop().time()
        await s.scaled(Drain(s.world.endpoint("server-0")))
        assert moves(s)
        await asyncio.sleep(before + 5.0 - asyncio.get_running_loop().time())
        s.world.crash("spare-0")
        await s.world.bring_up(["spare-1"])
        await until(lambda: restored(s))
        assert [event.version for event in restored(s)] == [1]

    recovery = Recovery(Checkpoint(seconds=5.0, path="memory://moved"))
    in_world(scenario, params=PARAMS, shards=1, recovery=recovery, extra=("spare-0",))


def test_a_node_that_is_drained_is_given_nothing_though_there_is_no_other() -> None:
    async def scenario(s: Setting) -> None:
        await s.scaled(Drain(s.world.endpoint("spare-0")))
        s.world.crash("replica-0-1")
        await asyncio.sleep(3.0)
        view = s.world.view(0)
        assert view.serving
        assert [s.world.name_of(member) for member in view.chain] == ["server-0"]
        await s.world.bring_up(["spare-1"])
        view = (await s.world.complete()).views[0]
        assert [s.world.name_of(member) for member in view.chain] == ["server-0", "spare-1"]

    in_world(scenario, shards=1, recovery=Recovery(Chain(2)), extra=("spare-0",))


def test_a_node_that_cannot_be_counted_on_now_is_drained_for_good() -> None:
    async def scenario(s: Setting) -> None:
        view = s.world.view(0)
        tail = s.world.endpoint("replica-0-1")
        await s.ask(COORDINATOR, ReportLink(0, view.epoch, tail, 0.0))
        await s.ask(COORDINATOR, Drain(tail))
        await s.world.complete()
        s.world.crash("spare-0")
        await asyncio.sleep(3.0)
        chain = s.world.view(0).chain
        assert [s.world.name_of(member) for member in chain] == ["server-0"]

    in_world(scenario, shards=1, recovery=Recovery(Chain(2)), extra=("spare-0",))


def test_an_idle_node_takes_the_place_of_one_that_is_drained() -> None:
    async def scenario(s: Setting) -> None:
        table = await s.scaled(Drain(s.world.endpoint("server-1")))
        assert loads(s, table) == {"server-0": 3, "server-2": 3}

    in_world(scenario, params=PARAMS, shards=6, servers=2, extra=("server-2",))


def test_a_new_node_takes_the_place_of_one_that_was_lost() -> None:
    async def scenario(s: Setting) -> None:
        s.world.crash("server-1")
        table = await s.world.complete()
        while loads(s, table) != {"server-0": 3, "server-2": 3}:
            await asyncio.sleep(0.01)
            table = await s.world.complete()

    in_world(scenario, params=PARAMS, shards=6, servers=2, extra=("server-2",))


def test_states_are_kept_elsewhere_before_their_node_is_drained() -> None:
    async def scenario(s: Setting) -> None:
        worker = Pusher(*await s.enter("worker-0"))
        await asyncio.sleep(0.2)
        table = await s.scaled(Drain(s.world.endpoint("store-0")))
        assert table.stores == (s.world.endpoint("store-1"),)
        s.world.crash("store-0")
        s.world.crash("server-0", back_after=0.1)
        await asyncio.sleep(1.0)
        await counted(s, await worker.stopped())

    recovery = Recovery(SharedStore(every=4), Continue())
    in_world(scenario, params=PARAMS, shards=2, recovery=recovery, extra=("store-1",))


def test_a_store_that_is_drained_is_not_empty_before_another_one_has_the_states() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("worker-0")
        await client.push(ONES)
        old, new = s.world.endpoint("store-0"), s.world.endpoint("store-1")
        for server in ("server-0", "server-1"):
            s.network.slow(server, "store-1", 0.3)
        await s.ask(COORDINATOR, Drain(old))
        while (table := s.world.table).stores != (new,) or not table.complete:
            assert old in table.leaving
            await asyncio.sleep(0.01)
        await until(lambda: old not in s.world.table.leaving, 1.0)
        s.world.crash("store-0")
        s.world.crash("server-0", back_after=0.1)
        await until(lambda: restored(s))
        assert restored(s)[-1].version == 1

    recovery = Recovery(SharedStore(every=4))
    in_world(scenario, params=PARAMS, shards=2, recovery=recovery, extra=("store-1",))


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_of", "error", "text"),
    [
        (lambda s: Scale(0), ConfigurationError, "1 to 2 servers"),
        (lambda s: Scale(3), ConfigurationError, "1 to 2 servers"),
        (lambda s: Drain(s.world.endpoint("server-0")), CapacityError, "leave 0 nodes"),
        (lambda s: Drain(s.world.endpoint("store-0")), CapacityError, "no other node for a store"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(
    request_of: Callable, error: type, text: str
) -> None:
    async def scenario(s: Setting) -> None:
        with pytest.raises(error, match=text):
            await s.scaled(request_of(s))
        with pytest.raises(CapacityError, match="there are 1 nodes"):
            await s.scaled(Scale(2))

    recovery = Recovery(SharedStore(every=4))
    in_world(scenario, params=PARAMS, shards=2, servers=1, recovery=recovery)


def test_shards_that_go_back_together_stay_where_they_are() -> None:
    async def scenario(s: Setting) -> None:
        for request in (Scale(2), Drain(s.world.endpoint("server-0"))):
            with pytest.raises(ConfigurationError, match="cannot move under"):
                await s.scaled(request)

    recovery = Recovery(Checkpoint(path=f"{SCHEME}://scaling/all", scope="all"))
    files = disk("scaling")
    try:
        in_world(scenario, params=PARAMS, shards=2, recovery=recovery)
    finally:
        files.erase()


# -- workers ---------------------------------------------------------------------------------------


def test_a_worker_that_is_dismissed_learns_of_it_within_a_lease() -> None:
    async def scenario(s: Setting) -> None:
        clients = [(await s.enter(f"worker-{i}"))[1] for i in range(2)]
        await s.scaled(Dismiss("worker-1"))
        await asyncio.sleep(s.world.group.timings.lease)
        assert [client.leaving for client in clients] == [False, True]

    in_world(scenario)


def test_who_comes_back_under_the_name_of_one_that_was_dismissed_is_not_asked_to_leave() -> None:
    """The one that was has left."""

    async def scenario(s: Setting) -> None:
        lease = s.world.group.timings.lease
        process, client = await s.enter("worker-0")
        await s.scaled(Dismiss("worker-0"))
        await until(lambda: client.leaving, lease)
        await process.run(client.leave("finished"))
        _, again = await s.enter("worker-0")
        await asyncio.sleep(lease)
        assert not again.leaving

    in_world(scenario)
