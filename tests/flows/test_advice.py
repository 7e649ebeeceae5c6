"""`dps advise` as it is called, and its estimate against closed forms."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flows.advice import LOSSES, NO_FAILURE, Situation, configuration, expected, scaled_profile
from flows.cli import main
from flows.config.profile import load_profile
from flows.config.trials import load_trials

WHAT = ["--model", "1MB", "--workers", "2", "--gradient", "500ms", "--mtbf", "1h"]
SITUATION = Situation(
    nbytes=1_000_000,
    workers=2,
    servers=1,
    gradient=0.5,
    mtbf=3600.0,
    outage=10.0,
    training=7200.0,
    every=20,
    server_price=1.0,
    worker_price=2.0,
    profile=load_profile("laptop").build(),
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    handler, umask = signal.getsignal(signal.SIGTERM), os.umask(0o022)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)
    os.umask(umask)


def called(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dps", "advise", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("--model", "400", "--model '400': expected a size"),
        ("--mtbf", "often", "--mtbf 'often': expected a time"),
        ("--outage", "0", "--outage '0': expected a time"),
        ("--profile", "labtop", "laptop"),
        ("--model", "400GB", "a server needs"),
        ("--output", "mine.yaml", "mine.yaml: exists, and was not written"),
    ],
)
def test_what_cannot_be_answered_ends_with_code_2(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    text: str,
    said: str,
) -> None:
    (here / "mine.yaml").write_text("experiment: mine\n")
    assert called(monkeypatch, *WHAT, option, text) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.err.startswith("dps: ")
    assert told.out == ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_strategies_are_run_and_the_experiment_is_left_to_go_on_with(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--outage", "5s", "--every", "20", "--servers", "1", "--seeds", "3"]
    assert called(monkeypatch, *WHAT, *words, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    rows = {row["strategy"]: row for row in data["strategies"]}
    _, trials = load_trials("advice.yaml")
    assert {trial.labels["recovery"] for trial in trials} == set(rows)
    assert {trial["status"] for trial in data["trials"]} == {"valid"}
    assert rows["none"]["setback"] is None
    assert rows["chain(2)"]["lost"] == 0
    assert rows["chain(2)"]["setback"] < rows["checkpoint"]["setback"]
    assert rows["checkpoint + spare"]["setback"] < rows["checkpoint"]["setback"]
    assert 5 < rows["checkpoint"]["setback"] < 20
    assert 0 <= rows["checkpoint"]["lost"] <= 20
    assert rows["chain(2) + checkpoint"]["kept"] > rows["chain(2)"]["kept"]
    assert data["recommendation"].startswith(f"Use {data['strategies'][0]['strategy']}: ")
    assert (here / "results" / "advice" / "report.html").is_file()


@pytest.fixture
def planned(tmp_path: Path) -> tuple[Any, ...]:
    (tmp_path / "costs.yaml").write_text(yaml.safe_dump(scaled_profile(SITUATION)))
    config = configuration(SITUATION, 3, "advice", "costs.yaml")
    (tmp_path / "advice.yaml").write_text(config)
    return tuple(load_trials(str(tmp_path / "advice.yaml"))[1])


def outcome(labels: Mapping[str, str], setback: float) -> Any:
    row = {
        "faults": 1,  # a figure that is called as an axis is
        "gradients_together": 4.0 if labels["recovery"] == "none" else 3.0,
        "effect_training_seconds": None if labels["faults"] == NO_FAILURE else setback,
        "updates_lost": 5,
    }
    return SimpleNamespace(valid=True, identity=SimpleNamespace(labels=labels), row=lambda: row)


def test_the_share_that_is_kept_is_that_of_the_renewal_reward_theorem(
    planned: tuple[Any, ...],
) -> None:
    outcomes = [outcome(trial.labels, setback=36.0) for trial in planned]
    found = expected(SITUATION, planned, outcomes)
    checkpoint = found.loc["checkpoint"]
    assert checkpoint.kept == pytest.approx(0.75 / 1.01)
    assert checkpoint.setback == pytest.approx(36.0)
    assert checkpoint.usd == pytest.approx((1 + 2 * 2) / 3600 / (0.75 / 1.01 * 4) * 1e6)
    # Without recovery two hours must go by without a failure, which comes once an hour.
    again = SITUATION.outage + SITUATION.profile.start
    assert found.loc["none"].kept == pytest.approx(7200 / ((3600 + again) * math.expm1(2)))
    # The loss of both nodes of a pair leaves nothing of a chain, but for checkpoints below it.
    assert found.loc["chain(2)"].kept < found.loc["chain(2) + checkpoint"].kept
    seldom = expected(replace(SITUATION, mtbf=3.6e6), planned, outcomes)
    assert seldom.loc["checkpoint"].kept == pytest.approx(0.75 / 1.00001)


def test_a_loss_that_no_training_survives_begins_it_again(planned: tuple[Any, ...]) -> None:
    struck = {"recovery": "worker_cache", "faults": LOSSES["server"]}
    outcomes = [outcome(trial.labels, 1.0) for trial in planned if trial.labels != struck]
    found = expected(SITUATION, planned, outcomes)
    assert math.isinf(found.loc["worker_cache"].setback)
    assert found.loc["worker_cache"].kept < found.loc["checkpoint"].kept
