"""Trials on virtual time: valid for every strategy and kind of fault, and the same each time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from rich.console import Console

from dps.events import (
    CheckpointRefused,
    Disturbed,
    Evaluated,
    Event,
    Killed,
    Paused,
    Reported,
    Resumed,
)
from dps.protocol.executor import available_cores
from flows.config.experiment import TrialConfig
from flows.config.profile import load_profile
from flows.config.trials import Trial, digest
from flows.execution.preflight import check_deployments
from flows.execution.training import initial
from flows.metrics.prices import load_prices
from flows.metrics.trial import Trial as Recorded
from flows.records.record import EVENTS_FILE
from flows.report.html import write_report
from flows.report.study import Study
from flows.report.terminal import print_study
from flows.statistics.caveats import time_basis
from tests.support.virtual_trials import BASE, virtual_trial

STRATEGIES: dict[str, Any] = {
    "none": "none",
    "checkpoint": {"preset": "checkpoint", "durability": {"every": 20}},
    "checkpoint of all shards": {
        "preset": "checkpoint",
        "durability": {"every": 20, "mode": "sync", "scope": "all"},
    },
    "checkpoint, continue": {
        "durability": {"kind": "checkpoint", "every": 20},
        "outage": {"kind": "continue"},
    },
    "chain": "chain",
    "chain, continue": {
        "preset": "chain",
        "outage": {"kind": "continue", "buffer": "worker"},
        "replay": {"policy": "staleness_scaled"},
    },
    "stateless": "stateless",
    "stateless, wait": {"preset": "stateless", "outage": {"kind": "wait"}},
    "worker cache": {"durability": {"kind": "worker_cache"}},
    "worker cache, continue": {
        "durability": {"kind": "worker_cache"},
        "outage": {"kind": "continue"},
    },
}
LOSE_NOTHING = ("chain", "chain, continue", "stateless", "stateless, wait")
WRITE_CHECKPOINTS = ("checkpoint", "checkpoint of all shards", "checkpoint, continue")
HAVE_A_STORE = ("stateless", "stateless, wait", "checkpoint, continue", "worker cache, continue")


def fault(kind: str, target: str | list[str] = "server-0", **settings: Any) -> dict[str, Any]:
    return {"kind": kind, "target": target, "at_updates": 40, **settings}


def again_and_again(kind: str, **settings: Any) -> dict[str, Any]:
    every = {"mtbf": 0.15, "until": 0.35, "shape": 5.0}
    return {
        "kind": kind,
        "target": {"role": "server", "pick": "random"},
        "every": every,
        **settings,
    }


FAULTS: dict[str, list[dict[str, Any]]] = {
    "no fault": [],
    "kill": [fault("kill", back_after=0.2)],
    "kill of a worker": [fault("kill", "worker-0", back_after=0.2)],
    "kill of the store": [fault("kill", "store-0", back_after=0.2)],
    "pause": [fault("pause", seconds=0.3)],
    "long pause": [fault("pause", seconds=1.8)],
    "long pause of a host": [fault("pause", seconds=1.8, host=True)],
    "slow": [fault("slow", seconds=0.3)],
    "cut": [fault("cut", seconds=0.3)],
    "delay": [fault("delay", "worker-1", delay_seconds=0.02, seconds=0.3)],
    "corrupt": [
        {"kind": "corrupt", "shard": 0, "at_updates": 50},  # no checkpoint is being written then
        {"kind": "kill", "target": "server-0", "after": {"fault": 0}, "back_after": 0.2},
    ],
    "kills by a process": [again_and_again("kill", back_after=0.1)],
    "pauses by a process": [again_and_again("pause", seconds=0.1)],
    "trace": [{"kind": "trace", "csv": "trace.csv"}],
}
TRACE = "seconds,kind,target,duration\n0.1,pause,server-0,0.2\n0.5,kill,server-0,0.2\n"
PROOF: dict[str, type[Event]] = {
    "kill": Killed,
    "kill of a worker": Killed,
    "kill of the store": Killed,
    "pause": Resumed,
    "long pause": Paused,
    "long pause of a host": Resumed,
    "slow": Disturbed,
    "cut": Disturbed,
    "delay": Disturbed,
    "corrupt": CheckpointRefused,
    "kills by a process": Killed,
    "pauses by a process": Resumed,
    "trace": Killed,
}


def config(**changes: Any) -> TrialConfig:
    return TrialConfig.model_validate({**BASE, **changes})


def refusal(strategy: str, fault: str) -> str | None:
    """Why a strategy cannot be tried under a fault; None where it can be."""
    if "store" in fault and strategy not in HAVE_A_STORE:
        return "no node 'store-0'"
    if fault == "corrupt" and strategy not in WRITE_CHECKPOINTS:
        return "no checkpoints are written"
    return None


def combinations() -> list[tuple[str, str]]:
    """Each strategy and each kind of fault; the simulator tries all of both."""
    found = []
    for row, strategy in enumerate(STRATEGIES):
        for column, fault in enumerate(FAULTS):
            killed = fault == "kill" and strategy in ("none", "checkpoint", "chain", "stateless")
            if (killed or row == column % len(STRATEGIES)) and not refusal(strategy, fault):
                found.append((strategy, fault))
    return found


@pytest.mark.parametrize(("strategy", "fault"), combinations())
def test_a_trial_leaves_a_valid_record_and_the_same_one_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, fault: str
) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    monkeypatch.chdir(tmp_path)
    changes = {"recovery": STRATEGIES[strategy], "faults": FAULTS[fault]}
    first, again = (virtual_trial(tmp_path / name, **changes) for name in ("first", "again"))
    assert first.outcome.status == "valid", first.outcome.reason
    assert first.outcome.virtual == "laptop"
    assert fault not in PROOF or first.record.of(PROOF[fault])
    ledger = Recorded(first.record, load_prices()).ledger
    assert ledger.applied_twice == ledger.replica_conflicts == ledger.audit_mismatches == 0
    if strategy in LOSE_NOTHING:
        assert ledger.lost == 0
    # Not a number is like nothing, and a record says what it is more exactly than figures do.
    records = [(tmp_path / name / EVENTS_FILE).read_bytes() for name in ("first", "again")]
    assert records[0] == records[1]
    assert repr(first.outcome) == repr(again.outcome)


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [("none", "kill of the store"), ("chain", "corrupt")],
)
def test_a_fault_that_cannot_come_is_refused(strategy: str, fault: str) -> None:
    with pytest.raises(ValidationError, match=refusal(strategy, fault)):
        config(recovery=STRATEGIES[strategy], faults=FAULTS[fault])


def test_a_gradient_takes_what_the_configuration_and_the_profile_say(tmp_path: Path) -> None:
    slow = tmp_path / "slow.yaml"
    written = load_profile("laptop").model_dump(mode="json")
    slow.write_text(yaml.safe_dump({**written, "gradient": {"seconds": 0.04}}))

    def computed(**changes: Any) -> set[float]:
        reports = virtual_trial(tmp_path / f"{len(list(tmp_path.iterdir()))}", **changes).record.of(
            Reported
        )
        values = [x for e in reports if e.name == "compute_seconds" for x in e.values]
        return {round(value, 9) for value in values}

    assert computed() == {0.01}
    assert computed(cluster={"kind": "virtual", "profile": str(slow)}) == {0.04}


def test_the_time_limit_is_one_of_virtual_time(tmp_path: Path) -> None:
    done = virtual_trial(
        tmp_path / "trial", training={"updates": 400, "compute_seconds": 1.0}, time_limit=30
    )
    assert done.outcome.status == "failed"
    assert "within the time limit of 30 s" in done.outcome.reason


def test_another_profile_is_another_trial_and_another_place_of_the_same_is_not(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "copy.yaml"
    copy.write_text(yaml.safe_dump(load_profile("laptop").model_dump(mode="json")))
    digests = [
        digest(config(cluster={"kind": "virtual", "profile": profile}))
        for profile in ("laptop", str(copy), "cluster-25gbit")
    ]
    assert digests[0] == digests[1] != digests[2]
    assert digest(config(cluster={"kind": "local"})) not in digests


def test_reports_and_tables_say_that_time_was_virtual(tmp_path: Path) -> None:
    done = virtual_trial(tmp_path / "virtual" / "a-trial")
    page = write_report(tmp_path / "virtual", tmp_path / "report.html").read_text()
    assert "virtual, with the profile laptop" in page
    assert "2001" not in page  # when all virtual time begins
    console = Console(record=True, width=300, file=io.StringIO())
    print_study(Study((done.outcome,)), None, console)
    assert "virtual, with the profile laptop" in console.export_text()


def test_times_that_cannot_be_compared_are_said_to_be() -> None:
    assert time_basis(["", ""]) == time_basis([]) == ""
    assert time_basis(["laptop"]).startswith("virtual")
    mixed = time_basis(["laptop", "", "laptop"])
    assert "1 on real nodes, 2 on virtual time" in mixed
    assert "do not compare" in mixed
    assert "do not compare" in time_basis(["laptop", "cluster-25gbit"])


def test_one_trial_runs_on_each_core_unless_trials_take_the_cores_from_each_other() -> None:
    virtual, local = (
        Trial(kind, "virtual", {}, 3, config(cluster={"kind": kind}), "")
        for kind in ("virtual", "local")
    )
    assert check_deployments([virtual, virtual], None, pytest.fail) == available_cores()
    assert check_deployments([virtual, local], None, pytest.fail) == 1
    assert check_deployments([virtual], 7, pytest.fail) == 7


def test_objective_and_stationarity_are_told_where_they_are_asked_for(tmp_path: Path) -> None:
    penalty = {"kind": "l1", "strength": 0.001}
    settings: dict[str, Any] = {
        "optimizer": {"kind": "proximal", "learning_rate": 0.1, "penalty": penalty},
        "evaluation": {"every_seconds": 0.2, "objective": {"reference": 1.0, "target": 20.0}},
    }
    scores = virtual_trial(tmp_path / "trial", **settings).record.of(Evaluated)
    first, last = scores[0], scores[-1]
    written = config(**settings)
    problem, data = written.build_objective(), written.dataset.load("train")
    assert problem is not None
    start = problem.score(initial(written), data.x_train, data.y_train)
    assert (first.objective, first.stationarity) == pytest.approx(start, rel=1e-4)
    assert last.objective is not None
    assert last.stationarity is not None
    assert last.objective < 0.9 * start[0]
    assert last.stationarity < start[1]
