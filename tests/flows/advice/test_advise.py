"""`dps advise` as it is called, and its estimate against trainings that fail again and again."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean

import pytest

from flows.advice.emulation import Job, Measured, configured, ran, scaled_profile, simulate
from flows.advice.estimate import expected
from flows.advice.situation import STRATEGIES, Situation
from flows.advice.trials import run_trials
from flows.cli import main
from flows.config.profile import load_profile

NONE, CHECKPOINT, *_ = STRATEGIES
WHAT = ["--model", "1MB", "--workers", "2", "--gradient", "50ms", "--mtbf", "1h"]


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
        ("--model", "400GB", "a server takes"),
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
    assert called(monkeypatch, *WHAT, option, text) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.err.startswith("dps: ")
    assert told.out == ""


@pytest.mark.slow
def test_all_strategies_are_told_as_json_and_nothing_is_left(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = here / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert called(monkeypatch, *WHAT, "--outage", "5s", "--seeds", "4", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    rows = {row["label"]: row for row in data["strategies"]}
    assert list(rows) == [strategy.label for strategy in STRATEGIES]
    assert rows["none"]["at_risk"] is None
    assert rows["chain(2)"]["at_risk"] == 0
    assert rows["chain(2)"]["setback"] < rows["checkpoint"]["setback"]
    assert rows["checkpoint + spare"]["setback"] < rows["checkpoint"]["setback"]
    assert 5 < rows["checkpoint"]["setback"] < 10
    assert 0 < rows["checkpoint"]["at_risk"] <= rows["checkpoint"]["every"]
    assert rows["chain(2) + checkpoint"]["every"] >= 10
    assert 0 < rows["chain(2) + checkpoint"]["at_risk"] < 1
    assert rows["chain(2) + checkpoint"]["kept"] > rows["chain(2)"]["kept"]
    assert rows["stateless"]["stale"] > 0
    assert min(row["relative"] for row in rows.values()) == 1
    assert not list(here.glob("results")) + list(here.glob("mlruns")) + list(folder.iterdir())


@pytest.mark.slow
def test_the_estimate_predicts_a_training_that_fails_again_and_again(tmp_path: Path) -> None:
    situation = Situation(
        nbytes=1_000_000,
        workers=2,
        servers=1,
        gradient=0.05,
        mtbf=5.0,
        outage=0.5,
        training=3600.0,
        server_price=1.0,
        worker_price=1.0,
        profile=load_profile("laptop").build(),
    )

    def run(jobs: Sequence[Job]) -> list[Measured]:
        return list(map(partial(simulate, situation, folder=str(tmp_path)), jobs))

    trialled = run_trials(situation, (NONE, CHECKPOINT), 4, run)
    _, told = expected(situation, trialled)
    assert told.every is not None
    updates, seeds = 1500, range(2)
    every = {"mtbf": situation.mtbf, "until": 200}
    again = {"kind": "kill", "target": "server-0", "every": every, "back_after": situation.outage}
    met, seconds = 0, 0.0
    for seed in seeds:
        folder = tmp_path / f"long-{seed}"
        folder.mkdir()
        job = Job(CHECKPOINT, told.every, seed, updates)
        config = configured(situation, job, scaled_profile(situation, folder))
        row = ran({**config, "faults": [again]}, folder).row()
        assert row["status"] == "valid"
        met += row["faults"]
        seconds += row["training_seconds"]
    progress = updates * len(seeds) / trialled[1].rate
    # As many failures as these trainings met, each of which costs what was told.
    assert seconds - progress == pytest.approx(met * told.setback, rel=0.15)
    # As many as a Poisson process has in the time, but for three times its deviation.
    kept = progress / seconds * told.pace
    spread = 3 * math.sqrt(met) / met * told.lost_time / (1 + told.lost_time) * told.kept
    assert kept == pytest.approx(told.kept, abs=spread)


@pytest.mark.slow
def test_what_the_loss_of_a_pair_costs_over_checkpoints_is_what_a_trial_measures(
    tmp_path: Path,
) -> None:
    situation = Situation(
        nbytes=1_000_000,
        workers=2,
        servers=1,
        gradient=0.05,
        mtbf=300.0,
        outage=5.0,
        training=3600.0,
        server_price=1.0,
        worker_price=1.0,
        profile=load_profile("laptop").build(),
    )
    layered = next(s for s in STRATEGIES if s.label == "chain(2) + checkpoint")
    chain = next(s for s in STRATEGIES if s.label == layered.above)

    def run(jobs: Sequence[Job]) -> list[Measured]:
        return list(map(partial(simulate, situation, folder=str(tmp_path)), jobs))

    trialled = run_trials(situation, (NONE, chain, layered), 4, run)
    *_, told = expected(situation, trialled)
    assert told.every is not None
    phases, updates, delays = 4, 150, []
    for phase in range(phases):
        seconds = []
        both = {
            "kind": "kill",
            "target": ["server-0", "replica-0-1"],
            "at_updates": 60 + phase * told.every // phases,
            "back_after": situation.outage,
        }
        for name, faults in (("control", []), ("struck", [both])):
            folder = tmp_path / f"{name}-{phase}"
            folder.mkdir()
            job = Job(layered, told.every, phase, updates)
            config = configured(situation, job, scaled_profile(situation, folder))
            row = ran({**config, "faults": faults}, folder).row()
            assert row["status"] == "valid"
            seconds.append(row["training_seconds"])
        delays.append(seconds[1] - seconds[0])
    pairs = 2 / situation.mtbf * (1 - math.exp(-situation.again / situation.mtbf))
    # Here a single loss sets a chain back by nothing, so that all that is told is the pair's.
    assert max(mean(strikes.setbacks) for strikes in trialled[2].strikes.values()) < 0
    told_delay = told.lost_time / pairs
    assert mean(delays) == pytest.approx(told_delay, rel=0.02)
