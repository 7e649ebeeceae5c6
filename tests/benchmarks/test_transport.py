"""The benchmark of transports: every peer does the same work, and the tables say what came out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import pytest

from benchmarks import throughput as bench
from benchmarks.peers.dask_actor import dask_actor
from benchmarks.peers.floor import CHUNK, floor
from benchmarks.peers.parameter_server import parameter_server
from benchmarks.peers.peer import Peer, Timed, Turn
from benchmarks.peers.raw_tcp import raw_tcp
from benchmarks.peers.ray_actor import ray_actor
from benchmarks.peers.torch_rpc import torch_rpc
from benchmarks.throughput import Cell, rate_of
from benchmarks.transport import (
    TRANSPORTS,
    Size,
    measure,
)
from dps.errors import DpsError
from tests.support.needs_torch import needs_torch

needs_ray = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra `bench` is not installed"),
]
SMALL = Size("40 KB", 40_000, 3)
MANY_CHUNKS = 4 * (2 * CHUNK + 5)


def silent(line: str) -> None:
    pass


def turns(peer: Peer, nbytes: int) -> list[Turn]:
    """Two turns, of 3 calls and of 2."""
    with peer(nbytes) as timed:
        return [timed(3), timed(2)]


def assert_all_were_applied(found: list[Turn]) -> None:
    assert [len(turn.seconds) for turn in found] == [3, 2]
    assert min(found[0].seconds + found[1].seconds) > 0
    weights = [weight for turn in found for weight in turn.weights]
    assert weights == pytest.approx([-0.1, -0.3, -0.4, -0.5])


@pytest.mark.parametrize("peer", [raw_tcp, floor], ids=["raw TCP", "floor"])
def test_a_peer_of_processes_applies_every_gradient(peer: Peer) -> None:
    assert_all_were_applied(turns(peer, MANY_CHUNKS))


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(
    "peer",
    [dask_actor, *(partial(parameter_server, transport=each) for each in TRANSPORTS)],
    ids=["Dask actor", *TRANSPORTS],
)
def test_a_peer_on_dask_applies_every_gradient(peer: Peer) -> None:
    assert_all_were_applied(turns(peer, SMALL.nbytes))


@pytest.mark.parametrize(
    "peer",
    [
        pytest.param(ray_actor, marks=needs_ray, id="Ray actor"),
        pytest.param(torch_rpc, marks=needs_torch, id="torch RPC"),
    ],
)
def test_a_peer_of_an_extra_applies_every_gradient(peer: Peer) -> None:
    assert_all_were_applied(turns(peer, SMALL.nbytes))


# -- taking turns ------------------------------------------------------------------------------


class Scripted:
    """Peers whose calls take the seconds that are given for each round, and who takes turns when.

    It `loses` so many gradients of each turn, after the first.
    """

    def __init__(self, loses: int = 0) -> None:
        self.order: list[str] = []
        self._loses = loses

    def peer(self, name: str, seconds: list[float]) -> Peer:
        @contextlib.contextmanager
        def opened(nbytes: int) -> Iterator[Timed]:
            left, made = iter(seconds), 0

            def timed(calls: int) -> Turn:
                nonlocal made
                before, made = made, made + calls - self._loses
                self.order.append(name)
                return Turn([next(left)] * calls, (-0.1 * (before + 1), -0.1 * made))

            yield timed

        return opened


def test_systems_take_turns_and_the_first_round_does_not_count() -> None:
    scripted = Scripted()
    peers = {"a": scripted.peer("a", [9.0, 1.0, 3.0]), "b": scripted.peer("b", [9.0, 2.0, 5.0])}
    found = measure(SMALL, peers, 2, silent)
    assert scripted.order == ["a", "b", "b", "a", "a", "b"]
    assert found.seconds == {"a": [1.0, 3.0], "b": [2.0, 5.0]}


def test_a_system_that_does_less_is_not_measured() -> None:
    peers = {"lazy": Scripted(loses=1).peer("lazy", [1.0, 1.0])}
    with pytest.raises(DpsError, match=r"lazy: .* from -0\.1 to -0\.2 in 3 calls, expected -0\.3"):
        measure(SMALL, peers, 1, silent)


# -- gradients per second ----------------------------------------------------------------------


def test_only_calls_that_end_while_all_push_are_counted() -> None:
    early, late = [0.0, 1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5, 5.5]
    assert rate_of([early, late]) == pytest.approx((3 + 2) / 2.5)
    assert rate_of([early]) == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_real_round_has_a_rate_in_each_cell() -> None:
    cells = [Cell(2, 2), Cell(1, 1, replicas=2)]
    found = bench.throughput(TRANSPORTS, 1, silent, cells, nbytes=8000, seconds=0.2)
    assert [each.cell for each in found] == cells
    for each in found:
        assert list(each.rates) == list(TRANSPORTS)
        assert all(rate > 0 for rates in each.rates.values() for rate in rates)
