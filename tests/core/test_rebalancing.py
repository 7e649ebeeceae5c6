"""The placement of replicas on hosts that come and go: even, and with few moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dps.core.placement import Move, moves

HOSTS = "abcdefgh"


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[list[str]], list[str], int]:
    """Chains that may lack replicas, on hosts of which some are not to be used any more."""
    replicas = draw(st.integers(1, 3))
    hosts = draw(st.lists(st.sampled_from(HOSTS), min_size=replicas, unique=True))
    chain = st.lists(st.sampled_from(HOSTS), min_size=1, max_size=replicas, unique=True)
    return draw(st.lists(chain, min_size=1, max_size=16)), hosts, replicas


def after(chains: Sequence[Sequence[str]], plan: Sequence[Move[str]]) -> list[set[str]]:
    """The chains when moves are carried out, each of which must be possible."""
    held = [set(chain) for chain in chains]
    for move in plan:
        assert move.target not in held[move.shard]
        if move.source is not None:
            held[move.shard].remove(move.source)
        held[move.shard].add(move.target)
    return held


def fewest(chains: Sequence[Sequence[str]], hosts: Sequence[str], replicas: int) -> int:
    """How many moves are needed at least: what must leave its host, and what is too much there."""
    loads = Counter(host for chain in chains for host in chain if host in hosts)
    lacking = len(chains) * replicas - sum(loads.values())
    low, larger = divmod(len(chains) * replicas, len(hosts))
    quotas = [low + 1] * larger + [low] * (len(hosts) - larger)
    full = sorted((loads[host] for host in hosts), reverse=True)
    return lacking + sum(max(0, load - quota) for load, quota in zip(full, quotas, strict=True))


@given(placements())
def test_replicas_are_spread_evenly_over_the_hosts_and_shards_over_several(
    given: tuple[list[list[str]], list[str], int],
) -> None:
    chains, hosts, replicas = given
    held = after(chains, moves(chains, hosts, replicas))
    assert all(len(of_shard) == replicas and of_shard <= set(hosts) for of_shard in held)
    loads = Counter(host for of_shard in held for host in of_shard)
    counts = [loads[host] for host in hosts]
    assert max(counts) - min(counts) <= 1


@given(placements())
def test_no_more_moves_than_needed(given: tuple[list[list[str]], list[str], int]) -> None:
    chains, hosts, replicas = given
    needed, made = fewest(chains, hosts, replicas), len(moves(chains, hosts, replicas))
    assert made == needed if replicas == 1 else needed <= made <= needed + replicas


@given(placements())
def test_one_move_at_a_time_comes_to_the_same_end(
    given: tuple[list[list[str]], list[str], int],
) -> None:
    chains, hosts, replicas = given
    first = plan = moves(chains, hosts, replicas)
    taken = 0
    while plan:
        chains = [sorted(of_shard) for of_shard in after(chains, plan[:1])]
        plan, taken = moves(chains, hosts, replicas), taken + 1
    assert taken == len(first) if replicas == 1 else taken <= len(first) + replicas


def test_what_has_nowhere_to_go_stays() -> None:
    assert moves([["a", "b"]], ["a"], 2) == ()
    assert moves([["a"]], [], 1) == ()
