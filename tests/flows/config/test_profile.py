"""Profiles as they are written down: those that come with dps, one's own, and wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dps.errors import ConfigurationError
from flows.config.profile import load_profile, shipped


def test_profiles_come_with_dps_each_with_its_sources() -> None:
    assert shipped() == (
        *("cluster-25gbit", "cluster-25gbit-double", "cluster-25gbit-half", "cluster-25mbit"),
        *("cluster-object-store", "laptop"),
    )
    for name in shipped():
        section = load_profile(name)
        assert section.name == name
        told = " ".join(section.sources)
        for what in ("link", "service", "disk", "start", "actor", "detection"):
            assert what in told
        assert section.build().name == name


def test_a_profile_of_ones_own_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    written = {**load_profile("laptop").model_dump(mode="json"), "name": "mine"}
    path.write_text(yaml.safe_dump({**written, "gradient": {"seconds": 0.5}}))
    assert load_profile(str(path)).build().gradient.seconds == 0.5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"link": {"latency": 0.0, "bandwidth": 1.0}}, r"line \d+: link.latency"),
        ({"speed": 1}, "unknown key"),
        ({"link": {"latency": 0.1}}, "link.bandwidth: is missing"),
    ],
)
def test_what_is_no_profile_is_refused_with_its_place(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    path = tmp_path / "mine.yaml"
    written = load_profile("laptop").model_dump(mode="json")
    path.write_text(yaml.safe_dump({**written, **change}))
    with pytest.raises(ConfigurationError, match=said):
        load_profile(str(path))


@pytest.mark.parametrize("cost", ["link", "service", "disk", "start", "actor", "detection"])
def test_a_profile_leaves_no_cost_out(tmp_path: Path, cost: str) -> None:
    path = tmp_path / "mine.yaml"
    written = load_profile("laptop").model_dump(mode="json")
    del written[cost]
    path.write_text(yaml.safe_dump(written))
    with pytest.raises(ConfigurationError, match=f"{cost}: is missing; add it"):
        load_profile(str(path))


def test_an_unknown_profile_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigurationError, match="laptop"):
        load_profile("latop")
