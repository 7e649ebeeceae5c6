"""Small simulated groups for tests of one behaviour, with floats or counters as parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any, TypeVar

import numpy as np

from dps.core.blocks import Layout
from dps.core.consistency import ASP, Consistency
from dps.core.filters.chain import checked, checked_of_pulls
from dps.core.filters.filter import Filter
from dps.core.functions import Function
from dps.core.placement import ConsistentHash
from dps.core.rules.rule import SGD, UpdateRule, by_rows
from dps.core.shard import ShardState
from dps.core.tables.table import SparseSpec
from dps.errors import DpsError
from dps.events import Event
from dps.protocol.client.client import Client
from dps.protocol.client.shard_client import OnAck
from dps.protocol.group import Group
from dps.protocol.messages import Table
from dps.protocol.transport import Endpoint
from dps.recovery.strategy import Recovery
from tests.simulator.network import Network, Process, SimTransport, Weather, run
from tests.simulator.schedules.strategies import TIMINGS
from tests.simulator.world import COORDINATOR, World

T = TypeVar("T")

HORIZON = 600.0
_numbers = count()


class Setting:
    """A group that is up, and what a test does with it.

    Attributes
    ----------
    random, network, world
        The parts of the simulation.
    """

    def __init__(
        self,
        group: Group,
        params: Mapping[str, np.ndarray],
        random: Random,
        weather: Weather,
        watched: bool = False,
    ) -> None:
        layout = group.layout
        initial = [layout.gather(shard, params)[0] for shard in range(len(layout.shards))]
        self.random = random
        self.network = Network(random, weather)
        self.world = World(group, initial, self.network, random, watched=watched)

    async def enter(self, worker: str, on_ack: OnAck | None = None) -> tuple[Process, Client]:
        """A worker that takes part."""
        process, client = self.world.client(worker, on_ack)
        await process.run(client.enter(process.address, worker))
        return process, client

    async def ask(self, to: Endpoint, request: Any, deadline: float = TIMINGS.call) -> Any:
        """Send a request that no client would send."""
        transport = SimTransport(self.network, self.network.process("tester"))
        return await transport.call(to, request, deadline)

    async def states(self) -> list[ShardState]:
        """The state of each shard's head."""
        table = await self.world.complete()
        return [self.world.states(view)[0] for view in table.views]

    async def lose(self) -> None:
        """Lose `server-0`, and wait until shard 0 is served by all its replicas again."""
        before = (await self.world.complete()).views[0].epoch
        self.world.crash("server-0", back_after=0.1)
        while (await self.world.complete()).views[0].epoch == before:
            await asyncio.sleep(0.01)

    async def clocks(self) -> list[dict[str, int]]:
        """The clock of each worker, on each shard's head."""
        return [state.clocks for state in await self.states()]

    async def scaled(self, request: Any) -> Table:
        """Ask for other hosts, and wait until nothing is to be moved any more."""
        await self.ask(COORDINATOR, request)
        table = await self.world.complete()
        while table.leaving:
            await asyncio.sleep(0.01)
            table = await self.world.complete()
        return table

    def process_at(self, endpoint: Endpoint) -> Process:
        """The process at an endpoint, dead or alive."""
        return self.network._processes[endpoint.address]

    def held_back(self, to: Endpoint, which: Callable[[Any], bool]) -> asyncio.Event:
        """Have an endpoint carry out some requests, but reply only when the event is set."""
        services = self.process_at(to).services
        handle, released = services[to.key], asyncio.Event()

        async def reply(message: Any) -> Any:
            came = await handle(message)
            if which(message):
                await released.wait()
            return came

        services[to.key] = reply
        return released

    async def all_of(self, *work: Awaitable[T], within: float) -> list[T]:
        """Wait until everything is done; it must be within so many virtual seconds."""
        async with asyncio.timeout(within):
            return await asyncio.gather(*work)


@contextmanager
def _failures_told(network: Network) -> Iterator[None]:
    """Raise what a process has failed with, and not that others have waited for it in vain."""
    task = asyncio.current_task()
    assert task is not None
    network.broken.add_done_callback(lambda _: task.cancel() if network.bugs else None)
    try:
        yield
    except (asyncio.CancelledError, TimeoutError, DpsError) as error:
        if network.bugs:
            raise network.bugs[0] from None
        for refusal in network.refusals.values():
            error.add_note(f"A process has refused with {type(refusal).__name__}: {refusal}")
        raise


async def until(holds: Callable[[], object], within: float = HORIZON) -> None:
    """Wait until something is so; it must be within so many virtual seconds."""
    async with asyncio.timeout(within):
        while not holds():
            await asyncio.sleep(0.01)


def happened(s: Setting, kind: type[Event]) -> list[Any]:
    """The events of a kind, in the order in which they came."""
    return [event for _, event in s.world.events if isinstance(event, kind)]


def same_state(a: ShardState, b: ShardState) -> bool:
    """Whether two states are equal, arrays bit by bit."""

    def others(state: ShardState) -> tuple[object, ...]:
        numbers = (state.index, state.version, state.steps)
        return *numbers, state.workers, state.batches, state.slots.keys(), state.results.keys()

    pairs = [(a.values, b.values), *((a.slots[k], b.slots[k]) for k in a.slots)]
    pairs += [(a.results[k], b.results[k]) for k in a.results]
    return others(a) == others(b) and all(
        x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs
    )


def in_world(
    scenario: Callable[[Setting], Awaitable[T]],
    *,
    seed: object = 0,
    params: Mapping[str, np.ndarray] | None = None,
    tables: Sequence[SparseSpec] = (),
    shards: int = 2,
    rule: UpdateRule = SGD(1.0),  # noqa: B008 - a frozen value
    consistency: Consistency = ASP(),  # noqa: B008 - a frozen value
    recovery: Recovery = Recovery(),  # noqa: B008 - a frozen value
    weather: Weather = Weather(),  # noqa: B008 - a frozen value
    filters: Mapping[str, Sequence[Filter]] | None = None,
    pull_filters: Mapping[str, Sequence[Filter]] | None = None,
    servers: int | None = None,
    incarnations: Mapping[str, int] | None = None,
    extra: Sequence[str] = (),
    meanwhile: Callable[[Setting], Awaitable[None]] | None = None,
    functions: Mapping[str, Function] | None = None,
    placement: ConsistentHash | None = None,
    watched: bool = False,
    **timings: Any,
) -> T:
    """Bring a group up on virtual time, `meanwhile` something else, and run the scenario.

    With `watched`, each node has a machine of its own with a monitor.
    """
    random = Random(str(seed))
    params = params if params is not None else {"w": np.zeros(40)}
    layout = Layout.of(params, shards, whole_rows=by_rows(rule), tables=tables)
    name = f"g-{next(_numbers)}"  # checkpoints of another world must not be taken for its own
    group = Group(
        name,
        layout,
        rule,
        consistency,
        recovery,
        COORDINATOR,
        replace(TIMINGS, **timings),
        filters=checked(filters or {}, layout.names, rule),
        pull_filters=checked_of_pulls(pull_filters or {}, layout.names),
    )
    group = replace(
        group, servers=servers, functions=functions or {}, incarnations=dict(incarnations or {})
    )
    group = replace(group, placement=placement)

    async def main() -> T:
        setting = Setting(group, params, random, weather, watched)
        with _failures_told(setting.network):
            others = [asyncio.ensure_future(meanwhile(setting))] if meanwhile else []
            await asyncio.gather(setting.world.start(extra), *others)
            async with asyncio.timeout(HORIZON):
                result = await scenario(setting)
            assert not setting.network.bugs
            return result

    return run(main, random)
