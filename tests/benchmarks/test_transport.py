"""The benchmark of transports: every peer does the same work, and the tables say what came out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks import throughput as bench
from benchmarks.peers.dask_actor import dask_actor
from benchmarks.peers.floor import CHUNK, floor
from benchmarks.peers.floor import caller as floor_caller
from benchmarks.peers.parameter_server import parameter_server
from benchmarks.peers.peer import Call, Peer, Timed, Turn, apart
from benchmarks.peers.raw_tcp import raw_tcp
from benchmarks.peers.ray_actor import ray_actor
from benchmarks.peers.torch_rpc import torch_rpc
from benchmarks.throughput import Cell, Rates, rate_of
from benchmarks.transport import (
    ACTOR,
    FLOOR,
    RAW,
    RAY,
    TORCH,
    TRANSPORTS,
    Measured,
    Size,
    Target,
    measure,
    missing,
    ours,
    systems,
    table,
    verdicts,
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


@pytest.mark.parametrize("nbytes", [1024, MANY_CHUNKS])
@pytest.mark.parametrize("peer", [raw_tcp, floor], ids=["raw TCP", "floor"])
def test_a_peer_of_processes_applies_every_gradient(peer: Peer, nbytes: int) -> None:
    assert_all_were_applied(turns(peer, nbytes))


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


def test_the_floor_applies_the_last_of_many_chunks_too() -> None:
    with floor_caller(MANY_CHUNKS) as call:
        call()
        assert call() == pytest.approx(np.full(MANY_CHUNKS // 4, -0.2))


@contextlib.contextmanager
def ends(nbytes: int) -> Iterator[Call]:
    """A peer whose process ends when it is called."""

    def call() -> None:
        raise SystemExit(3)

    yield call


def test_a_peer_that_ends_is_told() -> None:
    with apart(ends, 4) as timed, pytest.raises(DpsError, match="its process has ended"):
        timed(1)


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


@contextlib.contextmanager
def absent(nbytes: int) -> Iterator[Call]:
    """A peer that cannot be set up."""
    raise OSError("no room for the store")
    yield


def test_a_peer_that_cannot_be_set_up_is_told_and_left_out() -> None:
    told: list[str] = []
    a = Scripted().peer("a", [1.0, 1.0])
    found = measure(SMALL, {RAY: partial(apart, absent), "a": a}, 1, told.append)
    assert found.seconds == {"a": [1.0]}
    assert told[0] == f"{RAY} is left out: its process has ended, see above"
    with pytest.raises(DpsError, match="its process has ended"):
        measure(SMALL, {ours("dask"): partial(apart, absent)}, 1, silent)


def test_a_ratio_is_that_of_each_round() -> None:
    found = Measured(SMALL, {"dps, stream": [1.0, 30.0, 2.0], RAW: [2.0, 40.0, 4.0]})
    assert found.ratio("dps, stream", RAW) == 0.5
    assert found.milliseconds("dps, stream") == 2000


def test_peers_that_need_nothing_are_measured_for_real() -> None:
    found = measure(SMALL, {RAW: raw_tcp, FLOOR: floor}, 2, silent)
    assert {name: len(seconds) for name, seconds in found.seconds.items()} == {RAW: 2, FLOOR: 2}
    assert found.ratio(RAW, FLOOR) > 0


def test_what_is_measured_here() -> None:
    found = systems(["shared_memory", "dask", "stream"])
    assert {RAW, FLOOR, ACTOR} <= found.keys()
    assert found.keys() & {RAY, TORCH} == {RAY, TORCH} - set(missing())
    assert [name for name in found if name.startswith("dps")] == [
        "dps, shared_memory",
        "dps, dask",
        "dps, stream",
        "dps, dask, TLS",
    ]


# -- text --------------------------------------------------------------------------------------


SHARED = Measured(
    SMALL, {RAW: [0.004], FLOOR: [0.001], ours("shared_memory"): [0.002], ours("dask"): [0.008]}
)


def test_the_table_has_times_and_ratios() -> None:
    text = table([SHARED], 1)
    raw, shared, dask = (
        next(line for line in text.splitlines() if f"40 KB  {name} " in line)
        for name in (RAW, "dps, shared_memory", "dps, dask")
    )
    assert raw.split()[-1] == "4.000"
    assert shared.split()[-3:] == ["2.000", "0.50", "2.00"]
    assert dask.split()[-3:] == ["8.000", "2.00", "8.00"]
    for peer in missing():
        assert f"{peer}: not installed" in text


def test_the_table_has_gaps_where_a_peer_was_left_out() -> None:
    larger = Measured(Size("9 GB", 1, 1), {RAW: [0.1], ours("dask"): [0.2]})
    *_, line = (line for line in table([SHARED, larger], 1).splitlines() if "9 GB" in line)
    assert line.split()[-3:] == ["200.000", "2.00", "-"]


def test_a_target_is_met_or_missed_by_so_much() -> None:
    lanes = ("auto", "shared_memory")
    text = verdicts(
        [SHARED],
        [
            Target(lanes, SMALL, RAW, 0.4),
            Target(lanes, SMALL, FLOOR, 3.0),
            Target(lanes, SMALL, RAY, 1.0),
            Target(("stream",), SMALL, RAW, 1.0),
            Target(lanes, Size("another", 1, 1), RAW, 1.0),
        ],
    )
    _, raw, floored, ray = text.splitlines()
    assert raw.split()[-6:] == ["0.50", "missed,", "1.25", "of", "the", "limit"]
    assert floored.split()[-6:] == ["2.00", "met,", "0.67", "of", "the", "limit"]
    assert ray.endswith("not measured")


def test_without_a_target_there_is_nothing_to_judge() -> None:
    assert verdicts([SHARED]) == ""


# -- gradients per second ----------------------------------------------------------------------


def test_only_calls_that_end_while_all_push_are_counted() -> None:
    early, late = [0.0, 1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5, 5.5]
    assert rate_of([early, late]) == pytest.approx((3 + 2) / 2.5)
    assert rate_of([early]) == pytest.approx(1.0)


def test_workers_that_never_push_at_once_have_no_rate() -> None:
    with pytest.raises(DpsError, match="at no time did all 2 workers push"):
        rate_of([[0.0, 1.0], [1.0, 2.0]])


def test_rates_are_told_with_what_they_are_to_be() -> None:
    rates = {"shared_memory": [50.0, 60.0, 70.0], "dask": [20.0, 20.0, 40.0]}
    text = bench.table([Rates(Cell(4, 1, target=2.5), rates), Rates(Cell(4, 1, 2, 3.5), rates)], 3)
    plain, chain = text.splitlines()[3:]
    assert plain.split()[:6] == ["none", "1", "4", "60.0", "20.0", "2.50"]
    assert plain.endswith("shared_memory ≥ 2.5 × dask: met")
    assert chain.startswith("chain(2)")
    assert chain.endswith("shared_memory ≥ 3.5 × dask: missed")


@pytest.mark.slow
@pytest.mark.cluster
def test_a_real_round_has_a_rate_in_each_cell() -> None:
    cells = [Cell(2, 2), Cell(1, 1, replicas=2)]
    found = bench.throughput(TRANSPORTS, 1, silent, cells, nbytes=8000, seconds=0.2)
    assert [each.cell for each in found] == cells
    for each in found:
        assert list(each.rates) == list(TRANSPORTS)
        assert all(rate > 0 for rates in each.rates.values() for rate in rates)
