"""`dps calibrate`: what was measured comes out again, and a profile that can be used."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from dps.virtual.profile import Profile
from flows.config.profile import load_profile
from flows.execution import calibration
from flows.execution.calibration import Measured, fitted, predicted
from tests.flows.execution.test_run import CONFIG
from tests.support.commands import dps

SECONDS = 60.0


def measured_of(profile: Profile) -> Measured:
    """What would be measured where a profile is true."""
    return Measured(
        predicted(profile),
        ping=2 * profile.link.latency,
        port=1 / profile.link.bandwidth,
        update=profile.service.update,
        disk=(profile.disk.latency, 1 / profile.disk.bandwidth),
        handover=profile.work / 2,
        starts=[profile.start],
        actors=[profile.actor],
        detections=[profile.detection],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["laptop", "cluster-25gbit"])
def test_a_profile_that_is_measured_is_found_again(name: str) -> None:
    true = load_profile(name).build()
    found = fitted("again", measured_of(true))
    for nbytes, seconds in predicted(true).items():
        assert predicted(found)[nbytes] == pytest.approx(seconds, rel=0.1), nbytes
    assert (found.link, found.disk) == (true.link, true.disk)
    assert (found.start, found.actor) == (true.start, true.actor)
    assert found.detection == true.detection
    assert found.service.message == pytest.approx(true.service.message, rel=0.3)


@pytest.fixture
def linear() -> Measured:
    """1 ms for each call, and 1 ns for each byte that goes there and back."""
    calls = {nbytes: 1e-3 + 1e-9 * nbytes for nbytes in calibration.CALLS}
    calls[calibration.SMALLEST] = 1e-3
    seconds = (1e-4, 1e-10, 4e-10, (0.01, 1e-9), 1e-4)
    return Measured(calls, *seconds, starts=[0.4, 0.5, 2.0], actors=[0.02], detections=[0.01])


def test_what_a_call_takes_is_dealt_to_what_it_consists_of(linear: Measured) -> None:
    found = fitted("x", linear)
    assert found.link.latency == pytest.approx(5e-5)
    assert found.service.message == pytest.approx((1e-3 - 1e-4) / 2)
    each_way = 1 / found.link.bandwidth + found.service.byte
    assert 2 * each_way + found.service.update == pytest.approx(1e-9, rel=0.02)
    assert found.link.bandwidth == pytest.approx(1e10)
    assert found.disk.bandwidth == pytest.approx(1e9)
    assert (found.start, found.actor) == (0.5, 0.02)


def test_gradients_are_fitted_by_their_median_and_the_spread_of_their_logarithm(
    linear: Measured,
) -> None:
    drawn = np.random.default_rng(0).lognormal(np.log(0.02), 0.3, size=4000)
    found = fitted("x", replace(linear, gradients=drawn.tolist())).gradient
    assert found.seconds == pytest.approx(0.02, rel=0.05)
    assert found.spread == pytest.approx(0.3, rel=0.05)


@pytest.mark.cluster
@pytest.mark.slow
def test_a_machine_is_measured_and_its_profile_is_taken_by_an_experiment(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(CONFIG))
    ended = dps(tmp_path, "calibrate", "small.yaml", "--output", "mine.yaml")
    assert ended.returncode == 0, ended.stderr
    assert "ms, by the profile " in ended.stdout
    profile = load_profile(str(tmp_path / "mine.yaml"))
    assert profile.name == "mine"
    assert profile.gradient.seconds > 0
    assert 0 < profile.actor < SECONDS
    assert 0 < profile.start < SECONDS
    settings = ("--set", "cluster.kind=virtual", "--set", "cluster.profile=mine.yaml")
    ended = dps(tmp_path, "run", "small.yaml", *settings)
    assert ended.returncode == 0, ended.stderr
    told = f"virtual, with the profile {tmp_path / 'mine.yaml'}"
    assert told in "".join(ended.stdout.splitlines())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--output", "mine.txt"), "expected the name of a YAML file"),
        (("demo", "--set", "cluster.kind=virtual"), "virtual nodes cannot be measured"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    ended = dps(tmp_path, "calibrate", *words)
    assert ended.returncode == 2
    assert told in ended.stderr
    assert os.listdir(tmp_path) == []
