"""From an experiment to trials: names, labels and digests."""

from __future__ import annotations

import re

import pytest

from dps.errors import ConfigurationError
from flows.config import load_experiment
from flows.grid import expand, trial_name


def names(*overrides: str) -> list[str]:
    return [trial.name for trial in expand(load_experiment("demo", overrides))]


def test_names_are_readable_unique_and_safe() -> None:
    found = names()
    assert found[:3] == ["none.no-fault.seed-0", "none.no-fault.seed-1", "none.kill.seed-0"]
    assert len(set(found)) == 16
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


def test_digest_tells_what_a_trial_depends_on() -> None:
    first = {trial.name: trial.digest for trial in expand(load_experiment("demo"))}
    again = {trial.name: trial.digest for trial in expand(load_experiment("demo"))}
    assert first == again
    assert len(set(first.values())) == 16
    changed = expand(load_experiment("demo", ["training.batch_size=16"]))
    assert not {trial.digest for trial in changed} & set(first.values())
    # Only what is measured counts, not how a value is labelled or written.
    relabelled = expand(
        load_experiment("demo", ["axes.recovery={hot: {durability: {kind: chain, replicas: 2}}}"])
    )
    assert relabelled[0].digest == first["chain.no-fault.seed-0"]


def test_seeds_are_paired() -> None:
    trials = expand(load_experiment("demo"))
    by_combination: dict[tuple[str, ...], list[int]] = {}
    for trial in trials:
        by_combination.setdefault(tuple(trial.labels.values()), []).append(trial.seed)
    assert all(seeds == [0, 1] for seeds in by_combination.values())
