"""From an experiment to trials: names, labels and digests."""

from __future__ import annotations

import re

import pytest

from dps.errors import ConfigurationError
from flows.config.experiment import load_experiment
from flows.config.trials import expand, in_blocks, trial_name


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
        ({"consistency.tau": "4"}, "tau-4.seed-0"),
        ({"recovery": "../../etc"}, "etc.seed-0"),
        ({"faults": "…"}, "faults.seed-0"),
        ({"faults": "x" * 300}, "x" * 48 + ".seed-0"),
    ],
)
def test_labels_become_safe_parts_of_names(labels: dict[str, str], name: str) -> None:
    assert trial_name(labels, 0) == name


def test_labels_that_lead_to_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"would be named 'chain\.no-fault\.seed-0'"):
        names("axes.faults={no fault: [], no-fault: []}", "axes.recovery=[chain]")


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
