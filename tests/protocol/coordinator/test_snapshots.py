"""Consistent cuts: all shards go back together, to states that hold the same updates."""

from __future__ import annotations

import asyncio
import posixpath
from collections import defaultdict
from itertools import count
from typing import Any

import fsspec
import numpy as np
import pytest

from dps.core.consistency import ASP, BSP, SSP, Consistency
from dps.core.shard import ShardState
from dps.core.updates import Operation, UpdateId
from dps.errors import NotServing, StaleEpoch
from dps.events import CheckpointRefused, CutTaken, Event, Restored, RolledBack
from dps.protocol.client.client import Client
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.messages import EndCut, Evict, HoldCut, Pull, Push, TakeCut, WantCut
from dps.protocol.recovery import Recovery
from dps.protocol.storage.snapshot_checkpoints import CutCheckpoints
from dps.sim.network import Weather
from tests.support.worlds import TIMINGS, Setting, in_world, until

ONES = {"w": np.ones(40)}
SHARDS = 3
_numbers = count()


class Record:
    """The states that were written and restored, by cut and shard."""

    def __init__(self) -> None:
        self.written: defaultdict[int, dict[int, ShardState]] = defaultdict(dict)
        self.restored: list[tuple[int, int, ShardState]] = []

    def clear(self) -> None:
        self.written.clear()
        self.restored.clear()


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    record = Record()
    write, restore = CutCheckpoints.write_cut, CutCheckpoints.restore

    async def note_write(self: CutCheckpoints, epoch: int, cut: int, state: ShardState) -> None:
        await write(self, epoch, cut, state)
        record.written[cut][self._shard] = state

    async def note_restore(self: CutCheckpoints, epoch: int, cut: int) -> ShardState:
        state = await restore(self, epoch, cut)
        record.restored.append((cut, self._shard, state))
        return state

    monkeypatch.setattr(CutCheckpoints, "write_cut", note_write)
    monkeypatch.setattr(CutCheckpoints, "restore", note_restore)
    return record


def together(every: int | None = 8, **choices: Any) -> Recovery:
    path = f"memory://cuts-{next(_numbers)}"
    return Recovery(Checkpoint(every=every, path=path, scope="all", **choices))


def events(s: Setting, kind: type[Event]) -> list[Any]:
    return [e for _, e in s.world.events if isinstance(e, kind)]


def updates(state: ShardState) -> dict[str, tuple[int, int]]:
    """Which updates are in a state: each worker's, up to its clock."""
    return {name: (p.incarnation, p.clock) for name, p in state.workers.items()}


def assert_alike(states: dict[int, ShardState]) -> None:
    assert states.keys() == set(range(SHARDS))
    reached = [updates(state) for state in states.values()]
    for reach in reached:  # one that was given up, or enters again, is no part of a cut
        for name in list(reach):
            if not all(name in s.workers and s.workers[name].active for s in states.values()):
                del reach[name]
    assert all(reach == reached[0] for reach in reached)


def assert_exact(states: list[ShardState]) -> None:
    for state in states:
        assert state.version == sum(p.applied for p in state.workers.values())
        assert (state.values.view("float64") == -state.version).all()


async def train(s: Setting, name: str, pushes: int = 25) -> tuple[list[float], Client]:
    """Push, and return when each push was acked."""
    process, client = await s.enter(name)
    acked = []

    async def work() -> None:
        for _ in range(pushes):
            await client.push(ONES, pull=s.random.random() < 0.3)
            acked.append(asyncio.get_running_loop().time())
            await asyncio.sleep(s.random.uniform(0, 0.03))

    await process.run(work())
    await client.leave("finished")
    return acked, client


async def restorations(s: Setting, before: int) -> list[Restored]:
    """Wait until every shard has been restored once more."""
    while len(events(s, Restored)) < before + SHARDS:
        await asyncio.sleep(0.001)
    await s.world.complete()
    return events(s, Restored)[before:]


@pytest.mark.parametrize(
    "consistency",
    [
        ASP(),
        pytest.param(SSP(2), marks=pytest.mark.slow),
        pytest.param(BSP(), marks=pytest.mark.slow),
    ],
)
def test_after_a_loss_all_shards_go_back_to_the_same_updates(
    record: Record, consistency: Consistency
) -> None:
    every, restored_versions = 8, []

    async def scenario(s: Setting) -> None:
        training = [asyncio.create_task(train(s, f"worker-{i}")) for i in range(3)]
        await asyncio.sleep(s.random.uniform(0.1, 0.6))
        crashed, before = asyncio.get_running_loop().time(), len(events(s, Restored))
        states = [s.world.hosts[v.chain[0].address].replica(v.shard) for v in await views(s)]
        had = [replica.state.version for replica in states]
        s.world.crash(f"server-{s.random.randrange(SHARDS)}", back_after=0.05)
        back = await restorations(s, before)
        assert len({e.version for e in back}) == 1
        restored_versions.append(back[0].version)
        assert events(s, RolledBack)
        trained = await s.all_of(*training, within=60.0)
        acked = sum(at <= crashed for times, _ in trained for at in times)
        assert acked - back[0].version <= every
        assert max(had) >= back[0].version
        assert_exact(await s.states())

    for seed in range(12):
        record.clear()
        in_world(
            scenario,
            seed=seed,
            shards=SHARDS,
            consistency=consistency,
            recovery=together(every, mode="sync" if seed % 3 == 0 else "async"),
        )
        for cut, states in record.written.items():
            if len(states) == SHARDS:
                assert_alike(states), cut
        (cut,) = {cut for cut, _, _ in record.restored}
        assert_alike({shard: state for _, shard, state in record.restored})
    assert max(restored_versions) > every


async def views(s: Setting) -> Any:
    return (await s.world.complete()).views


@pytest.mark.slow
@pytest.mark.parametrize("lossy", [False, True])
def test_a_crash_while_a_cut_is_taken_does_no_harm(record: Record, lossy: bool) -> None:
    """Of a cut that was not complete, nothing is used."""
    losses = {"control": 0.03, "train": 0.03} if lossy else {}
    weather = Weather((0.001, 0.01), losses)
    aborted = 0

    async def scenario(s: Setting) -> None:
        nonlocal aborted
        training = [asyncio.create_task(train(s, f"worker-{i}")) for i in range(3)]
        await asyncio.sleep(0.1)
        for _ in range(2):
            before, writes = len(events(s, Restored)), sum(map(len, record.written.values()))
            while sum(map(len, record.written.values())) == writes:  # in the midst of a cut
                await asyncio.sleep(0.001)
            s.world.crash(f"server-{s.random.randrange(SHARDS)}", back_after=0.05)
            aborted += max(record.written) != max([e.cut for e in events(s, CutTaken)] or [0])
            back = await restorations(s, before)
            assert len({e.version for e in back}) == 1 or lossy
        await s.all_of(*training, within=100.0)
        complete = {0} | {e.cut for e in events(s, CutTaken)}
        assert {cut for cut, _, _ in record.restored} <= complete
        for cut in complete - {0}:
            assert_alike(record.written[cut])
        assert_exact(await s.states())

    for seed in range(12):
        record.clear()
        in_world(scenario, seed=seed, shards=SHARDS, recovery=together(6), weather=weather)
    assert aborted


def damage(path: str, cut: int, shard: int) -> None:
    fs, root = fsspec.url_to_fs(path)
    (data,) = [
        p for p in fs.find(root) if p.endswith(f"c{cut:06d}.safetensors") and f"d-{shard}/" in p
    ]
    fs.pipe_file(data, fs.cat_file(data)[:-1] + b"?")


def test_a_damaged_file_makes_all_shards_use_the_cut_before(record: Record) -> None:
    recovery = together(6, keep=3)
    path = recovery.durability.path  # type: ignore[union-attr]

    async def scenario(s: Setting) -> None:
        await asyncio.gather(*(train(s, f"worker-{i}") for i in range(2)))
        await asyncio.sleep(1.0)
        *_, earlier, newest = [e.cut for e in events(s, CutTaken)]
        damage(path, newest, shard=1)
        before = len(events(s, Restored))
        s.world.crash("server-0", back_after=0.05)
        await restorations(s, before)
        while events(s, RolledBack)[-1].cut != earlier:
            await asyncio.sleep(0.001)
        states = dict(enumerate(await s.states()))
        assert_alike(states)
        for shard, state in states.items():
            assert state.version == record.written[earlier][shard].version
        assert [(e.shard, e.path.endswith(f"c{newest:06d}.json")) for e in refused(s)] == [
            (1, True)
        ]
        assert events(s, RolledBack)[-1].cut == earlier
        await train(s, "worker-9", 20)
        assert len({state.version for state in await s.states()}) == 1
        assert max(e.cut for e in events(s, CutTaken)) > newest

    in_world(scenario, shards=SHARDS, recovery=recovery)


def refused(s: Setting) -> list[CheckpointRefused]:
    return events(s, CheckpointRefused)


def test_updates_that_touch_one_array_only_hold_no_cut_up() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        for i in range(20):
            name = "vw"[i % 2]
            await client.push({name: np.ones(10)})
        await asyncio.sleep(1.0)
        assert len(events(s, CutTaken)) >= 3
        reached = [updates(state) for state in await s.states()]
        assert reached[0] == reached[1] == {"a": (1, 20)}

    params = {"v": np.zeros(10), "w": np.zeros(10)}
    in_world(scenario, params=params, shards=2, recovery=together(4))


def test_a_worker_that_dies_between_shards_holds_cuts_up_for_a_lease_at_most() -> None:
    async def scenario(s: Setting) -> None:
        process, doomed = await s.enter("doomed")
        s.network.cut("doomed", "server-1")
        process.run(doomed.push(ONES))
        await asyncio.sleep(0.1)
        s.world.crash("doomed")
        s.network.heal()
        await s.all_of(train(s, "a"), within=10.0)
        assert len(events(s, CutTaken)) >= 3
        assert [state.version for state in await s.states()] == [26, 25, 26]

    in_world(scenario, shards=SHARDS, recovery=together(4))


def test_a_worker_that_catches_up_while_all_shards_go_back_holds_no_cut_up() -> None:
    """It joined where others were further by then than elsewhere; that is lost with all else."""

    async def scenario(s: Setting) -> None:
        _, a = await s.enter("a")
        s.network.cut("b", "server-1")
        process, b = s.world.client("b")
        entering = process.run(b.enter(process.address, "b"))
        await asyncio.sleep(0.1)
        await a.push(ONES)
        released = s.held_back(
            s.world.endpoint("server-0"),
            lambda m: isinstance(m, Push) and m.operation.kind == "tick",
        )
        s.network.heal()
        while [clocks.get("b") for clocks in await s.clocks()] != [1, 1]:
            await asyncio.sleep(0.01)
        assert not entering.done()
        s.world.crash("server-1", back_after=0.1)
        while not events(s, RolledBack):
            await asyncio.sleep(0.01)
        released.set()
        await s.all_of(entering, within=1.0)
        first, second = await s.clocks()
        assert first["b"] == second["b"] == 1
        taken = len(events(s, CutTaken))
        async with asyncio.timeout(5.0):  # without anything more from the other one
            for _ in range(20):
                await a.push(ONES)
        assert len(events(s, CutTaken)) > taken

    in_world(scenario, recovery=together(4))


def test_a_worker_that_came_to_one_shard_during_a_cut_is_not_in_it(record: Record) -> None:
    """All shards would go back to it, and take no other until that worker pushes again."""

    async def scenario(s: Setting) -> None:
        _, a = await s.enter("a")
        await a.push(ONES)
        second = s.world.endpoint("server-1")
        held = s.held_back(second, lambda m: isinstance(m, HoldCut))
        s.network.cut("b", "server-1")
        pushing = asyncio.create_task(a.push(ONES))
        await asyncio.sleep(0.03)  # a cut is being taken, and is held on both shards
        process, b = s.world.client("b")
        entering = process.run(b.enter(process.address, "b"))
        while ["b" in clocks for clocks in await s.clocks()] != [True, False]:
            await asyncio.sleep(0.01)
        held.set()
        await asyncio.sleep(0.3)
        s.network.heal()
        await s.all_of(pushing, entering, within=5.0)
        await until(lambda: events(s, CutTaken))
        for cut in (event.cut for event in events(s, CutTaken)):
            one, other = record.written[cut].values()
            assert one.clocks.keys() == other.clocks.keys()
        await s.lose()
        async with asyncio.timeout(5.0):  # without anything more from the other one
            for _ in range(20):
                await a.push(ONES)

    in_world(scenario, recovery=together(4))


@pytest.mark.parametrize("choices", [{"every": 6}, {"every": None, "seconds": 0.5}])
def test_acks_wait_for_cuts_that_cannot_be_completed(choices: dict[str, Any]) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        acked: list[int] = []

        async def push() -> None:
            while True:
                acked.append(await client.push(ONES))
                await asyncio.sleep(0.1)

        s.network.cut("scheduler", "server-1")  # it can neither be held, nor told of the end
        s.network.cut("server-1", "scheduler")
        pushing = process.run(push())
        await asyncio.sleep(0.4)
        assert not events(s, CutTaken)
        assert len(acked) <= 6
        s.network.heal()
        await asyncio.sleep(6.0)
        assert len(acked) > 12
        assert events(s, CutTaken)
        pushing.cancel()

    in_world(scenario, shards=SHARDS, recovery=together(**choices), lease=30.0)


def test_a_cut_is_due_in_time_though_nothing_follows() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES)
        await asyncio.sleep(1.0)
        taken = len(events(s, CutTaken))
        assert taken
        await asyncio.sleep(20.0)
        assert len(events(s, CutTaken)) == taken
        s.world.crash("server-2", back_after=0.1)
        before = len(events(s, Restored))
        assert {e.version for e in await restorations(s, before)} == {1}

    in_world(scenario, shards=SHARDS, recovery=together(None, seconds=1.0))


def test_the_last_cuts_are_kept_and_nothing_else() -> None:
    recovery = together(4, keep=2)

    async def scenario(s: Setting) -> None:
        await train(s, "a")
        await asyncio.sleep(2.0)
        kept = {e.cut for e in events(s, CutTaken)[-2:]}
        fs, root = fsspec.url_to_fs(recovery.durability.path)  # type: ignore[union-attr]
        names = [posixpath.basename(p) for p in fs.find(root) if not p.endswith("run.json")]
        assert {int(name.partition("-c")[2][:6]) for name in names} == kept
        assert len(names) == 2 * 2 * SHARDS

    in_world(scenario, shards=SHARDS, recovery=recovery)


def test_without_any_update_all_shards_go_back_to_the_first_states() -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("a")
        before = len(events(s, Restored))
        s.world.crash("server-0", back_after=0.1)
        back = await restorations(s, before)
        assert {(e.version, e.source) for e in back} == {(0, "checkpoint")}

    in_world(scenario, shards=SHARDS, recovery=together())


def test_a_head_that_is_held_and_then_forgotten_goes_on_by_itself() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        view = (await s.world.complete()).views[0]
        await s.ask(view.chain[0], HoldCut(0, view.epoch, 100, TIMINGS.lease))
        push = process.run(client.push(ONES))
        await asyncio.sleep(0.2)
        assert not push.done()
        await s.all_of(push, within=1.0)

    in_world(scenario, shards=SHARDS, recovery=together())


def test_messages_of_a_cut_that_is_over_are_refused() -> None:
    async def scenario(s: Setting) -> None:
        await s.enter("a")
        view = (await s.world.complete()).views[0]
        head = view.chain[0]
        held = await s.ask(head, HoldCut(0, view.epoch, 100, TIMINGS.lease))
        with pytest.raises(NotServing, match="cut 99 of shard 0 is over"):
            await s.ask(head, TakeCut(0, view.epoch, 99, held.reach))
        await s.ask(head, TakeCut(0, view.epoch, 100, held.reach))
        await s.ask(head, EndCut(0, view.epoch, 101, False, 0))
        for request in (
            TakeCut(0, view.epoch, 100, held.reach),
            HoldCut(0, view.epoch, 100, TIMINGS.lease),
            HoldCut(0, view.epoch, 101, TIMINGS.lease),
        ):
            with pytest.raises(NotServing, match="is over"):
                await s.ask(head, request)
        await s.ask(s.world.group.coordinator, WantCut(0, view.epoch, 0))

    in_world(scenario, shards=SHARDS, recovery=together())


def test_a_host_from_which_a_shard_was_taken_back_answers_nobody_any_more() -> None:
    """It lives, its lease goes on, and clients may not have heard yet that others are asked now."""

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        await client.push(ONES)
        before = (await views(s))[1]
        (host,) = before.chain
        update = Operation("gradient", UpdateId("a", 1, 2), gradient=np.zeros(8 * 14, np.uint8))

        async def refused() -> None:
            """Whatever it is asked in the epoch that it served in."""
            for request in (
                Pull(1, before.epoch, "", 0, 0, 0.1),
                Push(1, before.epoch, update, False, 0.1),
                Evict(1, before.epoch, (UpdateId("a", 1, 0),)),
            ):
                with pytest.raises((StaleEpoch, NotServing)):
                    await s.ask(host, request)

        s.network.cut("scheduler", "server-1")  # it cannot be told to go back
        s.world.crash("server-0", back_after=0.1)
        await asyncio.sleep(2 * TIMINGS.copy)
        assert (await s.ask(host, Pull(1, before.epoch, "", 0, 0, 0.1))).version == 1
        assert not s.world.view(1).serving, "nobody else has the shard while it answers"
        s.network.heal()
        after = (await views(s))[1]
        assert s.world.name_of(host) == "server-1"
        assert after.chain != before.chain
        await refused()

    in_world(scenario, shards=SHARDS, recovery=together(), extra=("spare-0",), lease=60.0)
