"""What every transport does, simulated or on Dask, plainly or over TLS: one suite for all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from random import Random
from typing import Any

import numpy as np
import pytest
from distributed.core import ConnectionPool

from dps.cluster.backends.local import LocalCluster
from dps.cluster.backends.processes import is_gone
from dps.cluster.backends.tls import temporary
from dps.cluster.names import NodeSpec
from dps.cluster.transport.calls import ClusterTransport, Meter
from dps.cluster.transport.port import port_of_driver
from dps.errors import DeadlineExceeded, NotServing, RemoteError, StaleEpoch, TransportError
from dps.protocol.messages import Describe, Flush, GetTable, Save, Waiting, Weights
from dps.protocol.transport import Endpoint, Transport, TransportChoice
from tests.contracts.echo import Echo, EchoActor
from tests.simulator.network import Network, SimTransport, Weather, run
from tests.support.leftovers import nothing_left

SECONDS = 10.0


class Line:
    """A transport, an echo at its other end, and how to kill that."""

    def __init__(
        self, transport: Transport, echo: Endpoint, kill: Callable[[], Awaitable[None]]
    ) -> None:
        self.transport = transport
        self.echo = echo
        self.kill = kill

    async def call(self, message: Any, deadline: float = SECONDS) -> Any:
        return await self.transport.call(self.echo, message, deadline)


class BegunLine(Line):
    """A line whose messages are sent without a task where that is possible; it counts these."""

    begun = 0

    async def call(self, message: Any, deadline: float = SECONDS) -> Any:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        ended = reply.set_result
        if self.transport.begin(self.echo, message, deadline, "control", ended) is None:
            return await super().call(message, deadline)
        assert not reply.done()
        self.begun += 1
        found = await reply
        if isinstance(found, Exception):
            raise found
        return found


Check = Callable[[Line], Awaitable[None]]


def on_simulation(check: Check) -> None:
    async def main() -> None:
        random = Random(0)
        network = Network(random, Weather())
        here, there = network.process("here"), network.process("there")
        there.services["echo"] = Echo().reply_to

        async def kill() -> None:
            network.crash(there)

        await check(Line(SimTransport(network, here), Endpoint(there.address, "echo"), kill))

    run(main, Random(0))


def on_dask(cluster: LocalCluster, check: Check, wanted: TransportChoice) -> None:
    client = cluster.client

    async def main() -> None:
        (address,) = (await client.scheduler.identity(n_workers=-1))["workers"]
        future = client.submit(EchoActor, key="echo", actor=True)
        await future

        async def kill() -> None:
            assert await asyncio.to_thread(is_gone, cluster.kill("server-0"), SECONDS)

        port, found = port_of_driver(client), list[tuple[str, str]]()
        port.enter()

        def note(peer: str, transport: str, why: str) -> None:
            found.append((peer, transport))

        transport = ClusterTransport(client.rpc, Meter(), None, port, wanted, note)
        try:
            await check(Line(transport, Endpoint(address, "echo"), kill))
            # That is what has been checked, and not what does in its place.
            expected = "shared_memory" if wanted == "auto" else wanted
            assert found[0] == (address, expected)
        finally:
            port.exit()

    with nothing_left():
        client.sync(main)


# Of all that can be chosen: by what, and whether the cluster has TLS.
CHOICES: dict[str, tuple[TransportChoice, bool]] = {
    "dask": ("dask", False),
    "dask over tls": ("dask", True),
    "shared memory": ("auto", False),
    "shared memory beside tls": ("shared_memory", True),
    "stream": ("stream", False),
    "stream over tls": ("stream", True),
}
ON_DASK = [pytest.param(choice, marks=pytest.mark.cluster) for choice in CHOICES]


@pytest.fixture(params=["simulated", *ON_DASK])
def carry_out(request: pytest.FixtureRequest) -> Iterator[Callable[[Check], None]]:
    if request.param == "simulated":
        yield on_simulation
        return
    wanted, tls = CHOICES[request.param]
    with LocalCluster(
        [NodeSpec("server-0", "server")],
        ["dps.cluster.driver.parameter_server", "tests.contracts.echo"],
        security=temporary() if tls else None,
    ) as cluster:
        yield lambda check: on_dask(cluster, check, wanted)


Carry = Callable[[Check], None]


async def replies_come_back_byte_by_byte(line: Line) -> None:
    for size in (0, 1, 7, 4096, 1 << 20):
        values = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
        message = Weights(3, 1.5, -1, values)
        back = await line.call(message)
        assert (back.version, back.at) == (3, 1.5)
        assert back.values.dtype == values.dtype
        assert back.values.tobytes() == values.tobytes()


async def many_calls_at_once_get_their_own_replies(line: Line) -> None:
    calls = (line.call(GetTable(-1, 0.001 * (i % 5))) for i in range(20))
    echoes = (line.call(Weights(i, 0.0, -1, np.zeros(i, np.uint8))) for i in range(20))
    replies = await asyncio.gather(*calls, *echoes)
    assert replies[:20] == [Flush()] * 20
    assert [reply.values.size for reply in replies[20:]] == list(range(20))


async def errors_are_raised_here(line: Line) -> None:
    with pytest.raises(StaleEpoch, match="shard 7 is in another epoch"):
        await line.call(Save(7, 1))
    assert await line.call(Flush()) == Flush()
    nobody = Line(line.transport, Endpoint(line.echo.address, "nobody"), line.kill)
    with pytest.raises(NotServing, match="nobody"):
        await nobody.call(Flush())


async def a_defect_of_the_other_side_is_raised_and_the_peer_goes_on(line: Line) -> None:
    with pytest.raises(RemoteError, match="KeyError: 'echo'"):
        await line.call(Describe(0, 1))
    assert await line.call(Flush()) == Flush()


async def nothing_waits_past_its_deadline(line: Line) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(DeadlineExceeded, match=r"GetTable to echo at .*0\.2 s"):
        await line.call(GetTable(-1, 3.0), deadline=0.2)
    assert 0.19 < loop.time() - began < 1.5
    assert await line.call(Flush()) == Flush()


async def a_process_that_has_ended_is_gone_and_calls_to_it_end(line: Line) -> None:
    assert not await line.transport.gone(line.echo.address)
    waiting = asyncio.ensure_future(line.call(GetTable(-1, 60.0), deadline=5.0))
    assert await line.call(Waiting()) == Waiting()  # by now the echo has the call in hand
    await line.kill()
    with pytest.raises(TransportError):
        await waiting
    async with asyncio.timeout(SECONDS):  # one look may prove nothing, but the next one will
        while not await line.transport.gone(line.echo.address):
            await asyncio.sleep(0.01)
    with pytest.raises(TransportError):
        await line.call(Flush(), deadline=3.0)


def test_calls_have_their_replies_and_errors_in_time(carry_out: Carry) -> None:
    async def check(line: Line) -> None:
        await replies_come_back_byte_by_byte(line)
        await many_calls_at_once_get_their_own_replies(line)
        await errors_are_raised_here(line)
        await nothing_waits_past_its_deadline(line)
        if carry_out is not on_simulation:  # where a defect ends the run
            await a_defect_of_the_other_side_is_raised_and_the_peer_goes_on(line)
        await a_process_that_has_ended_is_gone_and_calls_to_it_end(line)

    carry_out(check)


def test_messages_without_a_task_have_their_replies_and_errors_in_time(
    carry_out: Carry, request: pytest.FixtureRequest
) -> None:
    async def check(line: Line) -> None:
        await line.call(Flush())  # which connects
        at_once = BegunLine(line.transport, line.echo, line.kill)
        await many_calls_at_once_get_their_own_replies(at_once)
        await replies_come_back_byte_by_byte(at_once)
        await errors_are_raised_here(at_once)
        await nothing_waits_past_its_deadline(at_once)
        if carry_out is not on_simulation:  # where a defect ends the run
            await a_defect_of_the_other_side_is_raised_and_the_peer_goes_on(at_once)
        await a_call_is_given_up(at_once)
        await a_process_that_has_ended_is_gone_and_calls_to_it_end(at_once)
        assert (at_once.begun == 0) == ("dask" in request.node.callspec.id)

    carry_out(check)


async def a_call_is_given_up(line: Line) -> None:
    replies: list[Any] = []
    give_up = line.transport.begin(line.echo, GetTable(-1, 0.2), SECONDS, "", replies.append)
    if give_up is not None:
        give_up()
        assert [type(reply) for reply in replies] == [TimeoutError]
    await line.call(GetTable(-1, 0.4))  # in which the late reply comes
    assert len(replies) <= 1


@pytest.mark.cluster
def test_a_message_to_a_process_that_has_just_ended_is_not_lost_on_the_way() -> None:
    """It ends while the loop is busy, so that sending shows it first."""

    def on_a_cluster(wanted: TransportChoice) -> None:
        with LocalCluster(
            [NodeSpec("server-0", "server")],
            ["dps.cluster.driver.parameter_server", "tests.contracts.echo"],
        ) as cluster:

            async def check(line: Line) -> None:
                await line.call(Flush())
                assert is_gone(cluster.kill("server-0"), SECONDS)
                replies: list[Any] = []
                calls = [Flush(), Flush(), Flush()]
                begun = [
                    line.transport.begin(line.echo, call, 3.0, "", replies.append) for call in calls
                ]
                with pytest.raises(TransportError):
                    await line.call(Flush(), deadline=3.0)
                assert len(replies) == sum(give_up is not None for give_up in begun)
                assert all(isinstance(reply, TransportError) for reply in replies)

            on_dask(cluster, check, wanted)

    for wanted in ("shared_memory", "stream"):
        on_a_cluster(wanted)


def test_silence_is_no_proof_that_a_process_has_ended() -> None:
    """Whoever cannot be reached in time may live: only a connection that is refused proves it."""
    with socket.socket() as deaf, ExitStack() as callers:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        port = deaf.getsockname()[1]
        while _is_answered(callers, port):  # until the system keeps no more that wait to be taken
            pass

        async def look() -> bool:
            async with ConnectionPool() as pool:
                return await ClusterTransport(pool, Meter()).gone(f"tcp://127.0.0.1:{port}")

        assert not asyncio.run(look())
        deaf.close()
        assert asyncio.run(look())


def _is_answered(callers: ExitStack, port: int) -> bool:
    caller = callers.enter_context(socket.socket())
    caller.settimeout(0.1)
    try:
        caller.connect(("127.0.0.1", port))
    except TimeoutError:
        return False
    return True
