"""How long trials take: guessed, then learnt from those that have ended."""

from __future__ import annotations

import pytest

from dps.protocol.executor import available_cores
from flows.config.experiment import load_experiment
from flows.config.trials import expand
from flows.monitor.estimate import Durations, guess
from tests.support.synthetic import demo_trials

TRIALS = demo_trials()


def test_a_guess_grows_with_what_there_is_to_do() -> None:
    plain = next(t for t in TRIALS if t.labels["faults"] == "no fault")
    killed = next(t for t in TRIALS if t.labels["faults"] == "kill")
    training = plain.config.training
    slow = training.model_copy(update={"compute_seconds": 0.05})
    slower = plain.config.model_copy(update={"training": slow})
    assert guess(plain.config) < guess(killed.config) < guess(slower)
    assert guess(slower) - guess(plain.config) == pytest.approx(800 * 0.04 / 2)


def test_what_was_seen_counts_more_than_guesses() -> None:
    durations = Durations()
    first, other = TRIALS[0], next(t for t in TRIALS if t.labels != TRIALS[0].labels)
    same = next(t for t in TRIALS if t.labels == first.labels and t.seed != first.seed)
    durations.note(first, 2 * guess(first.config))
    assert durations.of(same) == 2 * guess(first.config)
    assert durations.of(other) == pytest.approx(2 * guess(other.config))


def test_a_busy_machine_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    durations, guessed = Durations(), guess(TRIALS[0].config)
    for load, times in ((0.0, 1.0), (3.0 * available_cores() - 1, 3.0)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert durations.of(TRIALS[0]) == pytest.approx(times * guessed)
    virtual = expand(load_experiment("demo", ["cluster.kind=virtual"]))[0]
    assert durations.of(virtual) == pytest.approx(3 * guess(virtual.config))


def test_trials_at_once_take_as_long_as_the_longest_at_least() -> None:
    durations = Durations()
    durations.note(TRIALS[0], 10.0)
    one = durations.of(TRIALS[1])
    assert durations.total(TRIALS[:2], 1) == 10.0 + one
    assert durations.total(TRIALS[:2], 2) == pytest.approx((10.0 + one) / 2)
    assert durations.total(TRIALS[:2], 8) == max(10.0, one)
    assert durations.total([], 2) == 0.0
