"""From an experiment to trials: names, labels and digests."""

from __future__ import annotations

import re

import pytest

from dps.core.placement.hash_ring import ConsistentHash
from dps.errors import ConfigurationError
from flows.config.experiment import load_experiment
from flows.config.trials import Trial, expand, in_blocks, trial_name


def names(*overrides: str) -> list[str]:
    return [trial.name for trial in expand(load_experiment("demo", overrides))]


def test_names_are_readable_unique_and_safe() -> None:
    found = names()
    assert found[2:4] == ["none.no-fault.seed-2", "none.kill.seed-0"]
    assert len(set(found)) == 24
    assert all(re.fullmatch(r"[A-Za-z0-9._=-]+", name) for name in found)


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ({}, "seed-0"),
        ({"consistency.tau": "4"}, "tau-4.seed-0"),
        ({"recovery": "../../etc"}, "etc.seed-0"),
        ({"faults": "kill, twice!"}, "kill-twice.seed-0"),
        ({"faults": "…"}, "faults-.seed-0"),
        ({"faults": "x" * 300}, "x" * 48 + ".seed-0"),
    ],
)
def test_labels_become_safe_parts_of_names(labels: dict[str, str], name: str) -> None:
    assert trial_name(labels, 0) == name.replace("faults-.", "faults.")


def test_labels_that_lead_to_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"would be named 'chain\.no-fault\.seed-0'"):
        names("axes.faults={no fault: [], no-fault: []}", "axes.recovery=[chain]")


def test_a_name_may_be_as_long_as_that_of_a_folder() -> None:
    def longest(last: int) -> int:
        keys = ("recovery", "faults", "training.batch_size", "training.updates")
        values, lengths = ("none", "[]", "16", "100"), (48, 48, 48, last)
        axes = zip(keys, lengths, values, strict=True)
        varied = ", ".join(f"{key}: {{{'x' * length}: {value}}}" for key, length, value in axes)
        return max(map(len, names(f"axes={{{varied}}}")))

    assert longest(46) == 200
    with pytest.raises(ConfigurationError, match="expected 200 characters at most"):
        longest(47)


def test_digest_tells_what_a_trial_depends_on() -> None:
    first = {trial.name: trial.digest for trial in expand(load_experiment("demo"))}
    again = {trial.name: trial.digest for trial in expand(load_experiment("demo"))}
    assert first == again
    assert len(set(first.values())) == 24
    changed = expand(load_experiment("demo", ["training.batch_size=16"]))
    assert not {trial.digest for trial in changed} & set(first.values())
    # Only what is measured counts, not how a value is labelled or written.
    relabelled = expand(
        load_experiment("demo", ["axes.recovery={hot: {durability: {kind: chain, replicas: 2}}}"])
    )
    assert relabelled[0].digest == first["chain.no-fault.seed-0"]


def test_a_placement_that_is_not_chosen_leaves_a_trial_as_it_was() -> None:
    def first(*overrides: str) -> Trial:
        return expand(load_experiment("demo", overrides))[0]

    assert first("server.placement={kind: balanced}").digest == first().digest
    ring = "server={shards: 8, servers: 4, placement: {kind: consistent_hash, virtual_nodes: 9}}"
    assert first(ring).config.server.placement.build() == ConsistentHash(9)
    with pytest.raises(ConfigurationError, match=r"server\.placement.*needs servers="):
        first("server.placement={kind: consistent_hash}")
    with pytest.raises(ConfigurationError, match=r"virtual_nodes"):
        first("server={servers: 2, placement: {kind: consistent_hash, virtual_nodes: 0}}")


def test_a_transport_that_is_not_chosen_leaves_a_trial_as_it_was() -> None:
    def first(*overrides: str) -> Trial:
        return expand(load_experiment("demo", overrides))[0]

    assert first("server.transport=auto").digest == first().digest
    chosen = [first(f"server.transport={by}") for by in ("shared_memory", "stream", "dask")]
    assert len({trial.digest for trial in (first(), *chosen)}) == 4
    assert chosen[0].config.server.transport == "shared_memory"
    with pytest.raises(ConfigurationError, match=r"server\.transport"):
        first("server.transport=pigeon")


def test_trials_run_in_blocks_whose_order_is_drawn() -> None:
    def order(*overrides: str) -> list[str]:
        experiment = load_experiment("demo", overrides)
        return [trial.name for trial in in_blocks(experiment, expand(experiment))]

    found = order("seeds=[5, 2]")
    assert sorted(found) == sorted(names("seeds=[5, 2]"))
    first, second = found[:8], found[8:]
    assert {name[-1] for name in first} == {"5"}
    assert {name[-1] for name in second} == {"2"}
    # Each block has an order of its own, the same every time, and another with another seed.
    assert [name[:-1] for name in first] != [name[:-1] for name in second]
    assert order("seeds=[5, 2]") == found != order("seeds=[5, 2]", "order_seed=1")
    # What is added leaves the others in their order.
    fewer = order("seeds=[5, 2]", "axes.recovery=[none, chain]")
    assert fewer == [name for name in found if name in fewer]


@pytest.mark.slow
def test_over_many_blocks_every_place_is_as_likely() -> None:
    experiment = load_experiment("demo", [f"seeds={list(range(400))}"])
    places = [
        place % 8
        for place, trial in enumerate(in_blocks(experiment, expand(experiment)))
        if trial.name.startswith("chain.kill")
    ]
    counts = [places.count(place) for place in range(8)]
    assert max(abs(count - 50) for count in counts) < 30  # 4.5 standard deviations


def test_seeds_are_paired() -> None:
    trials = expand(load_experiment("demo"))
    by_combination: dict[tuple[str, ...], list[int]] = {}
    for trial in trials:
        by_combination.setdefault(tuple(trial.labels.values()), []).append(trial.seed)
    assert all(seeds == [0, 1, 2] for seeds in by_combination.values())
