"""Trials on virtual time: valid for every strategy and kind of fault, and the same each time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import ValidationError
from rich.console import Console

from dps.events import (
    CapacityRestored,
    CheckpointRefused,
    Disturbed,
    Evaluated,
    Event,
    Killed,
    Paused,
    Reported,
    Restored,
    Resumed,
)
from dps.protocol.executor import available_cores
from flows.analysis.finished import Finished, print_comparison, read_finished
from flows.analysis.prices import load_prices
from flows.analysis.virtual_time import told
from flows.config.experiment import TrialConfig
from flows.config.faults import FaultSection
from flows.config.profile import load_profile
from flows.config.trials import Trial, digest
from flows.execution.preflight import check_deployments
from flows.execution.trial import initial, run_trial
from flows.records.record import EVENTS_FILE
from flows.report.html import write_report

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
    every = {"mtbf": 0.15, "until": 0.35, "distribution": "weibull", "shape": 5.0}
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
    "disk_full": [fault("disk_full", seconds=0.3)],
    "disk_full of the store": [
        fault("disk_full", "store-0", seconds=0.5),
        fault("kill", back_after=0.2),  # so that updates go to the mailbox, if there is one
    ],
    "corrupt": [
        {"kind": "corrupt", "shard": 0, "at_updates": 50},  # no checkpoint is being written then
        {"kind": "kill", "target": "server-0", "after": {"fault": 0}, "back_after": 0.2},
    ],
    "flap": [fault("flap", times=2, up_seconds=0.1, down_seconds=0.2)],
    "flap by kills": [
        {
            **fault("flap", by="kill", times=2, up_seconds=0.35, down_seconds=0.05),
            "at_updates": 20,
        }
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
    "disk_full of the store": Disturbed,
    "corrupt": CheckpointRefused,
    "flap": Resumed,
    "flap by kills": CapacityRestored,
    "kills by a process": Killed,
    "pauses by a process": Resumed,
    "trace": Killed,
}
UPDATES = 120


def trial(**changes: Any) -> Trial:
    written = {
        "experiment": "virtual",
        "workload": {"kind": "softmax"},
        "dataset": {"kind": "digits"},
        "training": {"workers": 2, "updates": UPDATES, "compute_seconds": 0.01},
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
        "server": {"shards": 2, "lease": 1.0},
        "recovery": "none",
        "evaluation": {"every_seconds": 0.2},
        "cluster": {"kind": "virtual"},
        "seed": 3,
        **changes,
    }
    config = TrialConfig.model_validate(written)
    return Trial("a-trial", "virtual", {}, 3, config, digest(config))


def ran(folder: Path, **changes: Any) -> Finished:
    folder.mkdir(parents=True)
    run_trial(trial(**changes), folder, lambda event: None)
    return read_finished(folder / EVENTS_FILE, load_prices())


def refusal(strategy: str, fault: str) -> str | None:
    """Why a strategy cannot be tried under a fault; None where it can be."""
    if "store" in fault and strategy not in HAVE_A_STORE:
        return "there is no node 'store-0'"
    if fault == "corrupt" and strategy not in WRITE_CHECKPOINTS:
        return "no checkpoints are written"
    if fault == "disk_full":
        written = strategy in WRITE_CHECKPOINTS
        return "in memory and never full" if written else "nothing is written to disk"
    return None


def combinations() -> list[Any]:
    """All of them; those that are not slow have each strategy and each kind of fault."""
    found = []
    for row, strategy in enumerate(STRATEGIES):
        for column, fault in enumerate(FAULTS):
            quick = fault == "kill" or row == column % len(STRATEGIES) or refusal(strategy, fault)
            found.append(pytest.param(strategy, fault, marks=() if quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("strategy", "fault"), combinations())
def test_a_trial_leaves_a_valid_record_and_the_same_one_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, fault: str
) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    monkeypatch.chdir(tmp_path)
    changes = {"recovery": STRATEGIES[strategy], "faults": FAULTS[fault]}
    if (why := refusal(strategy, fault)) is not None:
        with pytest.raises(ValidationError, match=why):
            trial(**changes)
        return
    first, again = (ran(tmp_path / name, **changes) for name in ("first", "again"))
    assert first.outcome.status == "valid", first.outcome.reason
    assert first.outcome.virtual == "laptop"
    assert fault not in PROOF or first.record.of(PROOF[fault])
    ledger = first.outcome.ledger
    assert ledger.applied_twice == ledger.replica_conflicts == ledger.audit_mismatches == 0
    if strategy in LOSE_NOTHING:
        assert ledger.lost == 0
    # Not a number is like nothing, and a record says what it is more exactly than figures do.
    records = [(tmp_path / name / EVENTS_FILE).read_bytes() for name in ("first", "again")]
    assert records[0] == records[1]
    assert repr(first.outcome) == repr(again.outcome)


@pytest.mark.parametrize("below", [None, {"every": 20}], ids=["alone", "over checkpoints"])
@pytest.mark.parametrize("lost", ["store-0", "store-1"])
def test_of_two_stores_one_may_be_lost_with_every_server(
    tmp_path: Path, lost: str, below: dict[str, Any] | None
) -> None:
    durability = {"kind": "shared_store", "stores": 2, "below": below}
    done = ran(
        tmp_path / "trial",
        recovery={"durability": durability, "outage": {"kind": "continue"}},
        faults=[fault("kill", ["server-0", "server-1", lost], back_after=0.2)],
    )
    assert done.outcome.status == "valid", done.outcome.reason
    assert {e.node for e in done.record.of(Killed)} == {"server-0", "server-1", lost}
    assert {e.source for e in done.record.of(Restored) if e.epoch > 2} == {"store"}
    ledger = done.outcome.ledger
    assert ledger.lost == ledger.applied_twice == ledger.audit_mismatches == 0


def test_every_kind_of_fault_is_among_those_that_are_tried() -> None:
    union, *_ = get_args(FaultSection)
    kinds = {get_args(each.model_fields["kind"].annotation)[0] for each in get_args(union)}
    assert kinds == {each["kind"] for plan in FAULTS.values() for each in plan}


def test_a_gradient_takes_what_the_configuration_and_the_profile_say(tmp_path: Path) -> None:
    slow = tmp_path / "slow.yaml"
    written = load_profile("laptop").model_dump(mode="json")
    slow.write_text(yaml.safe_dump({**written, "gradient": {"seconds": 0.04}}))

    def computed(**changes: Any) -> set[float]:
        reports = ran(tmp_path / f"{len(list(tmp_path.iterdir()))}", **changes).record.of(Reported)
        values = [x for e in reports if e.name == "compute_seconds" for x in e.values]
        return {round(value, 9) for value in values}

    assert computed() == {0.01}
    assert computed(cluster={"kind": "virtual", "profile": str(slow)}) == {0.04}


def test_the_time_limit_is_one_of_virtual_time(tmp_path: Path) -> None:
    done = ran(tmp_path / "trial", training={"updates": 400, "compute_seconds": 1.0}, time_limit=30)
    assert done.outcome.status == "failed"
    assert "within the time limit of 30 s" in done.outcome.reason


def test_servers_and_workers_come_and_go(tmp_path: Path) -> None:
    done = ran(
        tmp_path / "trial",
        server={"shards": 2, "servers": 1},
        elastic=[
            {"at_updates": 30, "servers": 2, "workers": 3},
            {"at_updates": 80, "servers": 1, "workers": 1},
        ],
    )
    assert done.outcome.status == "valid", done.outcome.reason


def test_what_is_no_profile_is_refused_and_so_is_tls() -> None:
    with pytest.raises(ValidationError, match="no profile of this name"):
        trial(cluster={"kind": "virtual", "profile": "latop"})
    with pytest.raises(ValidationError, match="expected off"):
        trial(cluster={"kind": "virtual", "tls": "temporary"})


def test_another_profile_is_another_trial_and_another_place_of_the_same_is_not(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "copy.yaml"
    copy.write_text(yaml.safe_dump(load_profile("laptop").model_dump(mode="json")))
    digests = [
        trial(cluster={"kind": "virtual", "profile": profile}).digest
        for profile in ("laptop", str(copy), "cluster-25gbit")
    ]
    assert digests[0] == digests[1] != digests[2]
    assert trial(cluster={"kind": "local"}).digest not in digests


def test_reports_and_tables_say_that_time_was_virtual(tmp_path: Path) -> None:
    done = ran(tmp_path / "virtual" / "a-trial")
    page = write_report(tmp_path / "virtual", tmp_path / "report.html").read_text()
    assert "virtual, with the profile laptop" in page
    assert "2001" not in page  # when all virtual time begins
    assert "arrays sent by" not in page
    console = Console(record=True, width=300, file=io.StringIO())
    print_comparison([done.outcome], console)
    assert "virtual, with the profile laptop" in console.export_text()


def test_times_that_cannot_be_compared_are_said_to_be() -> None:
    assert told(["", ""]) == told([]) == ""
    assert told(["laptop"]).startswith("virtual")
    mixed = told(["laptop", "", "laptop"])
    assert "1 on real nodes, 2 on virtual time" in mixed
    assert "do not compare" in mixed
    assert "do not compare" in told(["laptop", "cluster-25gbit"])


def test_one_trial_runs_on_each_core_unless_trials_take_the_cores_from_each_other() -> None:
    local = trial(cluster={"kind": "local"})
    assert check_deployments([trial(), trial()], None, pytest.fail) == available_cores()
    assert check_deployments([trial(), local], None, pytest.fail) == 1
    assert check_deployments([trial()], 7, pytest.fail) == 7


def test_objective_and_stationarity_are_told_where_they_are_asked_for(tmp_path: Path) -> None:
    penalty = {"kind": "l1", "strength": 0.05}
    settings: dict[str, Any] = {
        "workload": {"kind": "rica", "filters": 12},
        "dataset": {"kind": "patches", "count": 200, "size": 4, "components": 8},
        "optimizer": {"kind": "proximal", "learning_rate": 0.02, "penalty": penalty},
        "evaluation": {"every_seconds": 0.2, "objective": {"reference": 1.0, "target": 20.0}},
    }
    scores = ran(tmp_path / "rica", **settings).record.of(Evaluated)
    first, last = scores[0], scores[-1]
    config = trial(**settings).config
    problem, data = config.build_objective(), config.dataset.load("train")
    assert problem is not None
    start = problem.score(initial(config), data.x_train, data.y_train)
    assert (first.objective, first.stationarity) == pytest.approx(start, rel=1e-4)
    assert last.objective is not None
    assert last.stationarity is not None
    assert last.objective < 0.9 * start[0]
    assert last.stationarity < start[1]
