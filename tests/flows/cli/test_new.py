"""`dps new`: whatever can be chosen gives a configuration that can be run, and no file is lost."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product
from pathlib import Path

import pytest

from dps.errors import ConfigurationError
from flows.cli.new import (
    CLUSTER_KINDS,
    DATASETS,
    FAULTS,
    MOMENTS,
    RECOVERIES,
    ROLES,
    WORKLOADS,
    Choices,
    FaultKind,
    Recovery,
    Role,
    When,
    fits,
    written,
)
from flows.config.experiment import ExperimentConfig
from flows.config.trials import Trial, load_trials
from flows.config.yaml_document import parse_document

Happening = tuple[FaultKind, Role, When]
HAPPENINGS: list[Happening] = [
    ("none", "server", "drawn"),
    *((fault, role, when) for fault in FAULTS[1:] for role in ROLES for when in MOMENTS),
]
EVERY_SET: list[tuple[Recovery, ...]] = list(
    chain.from_iterable(combinations(RECOVERIES, n) for n in range(1, len(RECOVERIES) + 1))
)


def loaded(choices: Choices) -> tuple[ExperimentConfig, tuple[Trial, ...]]:
    return load_trials(parse_document(written("mine", choices).encode(), "mine.yaml"))


def named(happening: Happening) -> str:
    return " ".join(happening)


@pytest.mark.parametrize("happening", HAPPENINGS, ids=named)
def test_every_choice_of_a_fault_can_be_run_everywhere(happening: Happening) -> None:
    fault, role, when = happening
    for cluster in CLUSTER_KINDS:
        choices = Choices(
            recovery=RECOVERIES, fault=fault, role=role, when=when, seeds=1, cluster=cluster
        )
        experiment, trials = loaded(choices)
        assert len(trials) == len(RECOVERIES) * (1 if fault == "none" else 2)
        assert {trial.config.cluster.kind for trial in trials} == {cluster}
        planned = {bool(trial.config.build_faults()) for trial in trials}
        assert planned == ({False} if fault == "none" else {False, True})
        assert not any(trial.config.late_faults for trial in trials)
        assert experiment.claims


def every_training() -> Iterator[Choices]:
    for workload, dataset in product(WORKLOADS, DATASETS):
        if fits(workload, dataset):
            yield Choices(workload=workload, dataset=dataset, seeds=1)


@pytest.mark.slow
@pytest.mark.parametrize("happening", HAPPENINGS, ids=named)
def test_all_choices_go_together(happening: Happening) -> None:
    fault, role, when = happening
    for choices, cluster in product(every_training(), CLUSTER_KINDS):
        loaded(
            replace(
                choices, recovery=RECOVERIES, fault=fault, role=role, when=when, cluster=cluster
            )
        )


@pytest.mark.parametrize("recovery", EVERY_SET, ids=" ".join)
def test_claims_are_of_what_is_compared(recovery: tuple[Recovery, ...]) -> None:
    for fault, claims in product(("none", "kill"), (True, False)):
        choices = Choices(recovery=recovery, fault=fault, claims=claims, seeds=1)
        found = loaded(choices)[0].claims
        comparable = len(recovery) > 1 or fault != "none"
        assert bool(found) == (claims and comparable)


@pytest.mark.parametrize(
    ("updates", "workers"), [(20, 1), (20, 256), (1_000_000, 1)], ids=["few", "many", "long"]
)
@pytest.mark.parametrize("when", MOMENTS)
def test_the_moment_is_within_the_training(updates: int, workers: int, when: When) -> None:
    choices = Choices(updates=updates, workers=workers, when=when, seeds=1, cluster="virtual")
    experiment, trials = loaded(choices)
    assert not any(trial.config.late_faults for trial in trials)
    assert experiment.training.workers == workers


# -- the command -----------------------------------------------------------------------------------


def dps(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *words],
        cwd=here,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_is_written_can_be_planned(tmp_path: Path) -> None:
    made = dps(tmp_path, "new", "mine", "--recovery", "chain", "--recovery", "none", "--seeds", "2")
    assert made.returncode == 0, made.stderr
    assert "mine.yaml: 8 trials" in made.stdout
    planned = dps(tmp_path, "plan", "mine.yaml")
    assert planned.returncode == 0, planned.stderr
    assert "chain.kill.seed-1" in planned.stdout


def test_data_of_ones_own_are_pointed_to() -> None:
    assert "docs/howto/own-data.md" in written("mine", Choices())
    assert (Path(__file__).parents[3] / "docs/howto/own-data.md").is_file()


def test_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("precious")
    (tmp_path / "link.yaml").symlink_to("nowhere")
    for name in ("mine", "link"):
        refused = dps(tmp_path, "new", name)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "nothing is replaced" in refused.stderr
    assert (tmp_path / "mine.yaml").read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a b"], "names a folder"),
        (["../mine"], "names a folder"),
        (["mine", "--recovery", "chian"], "did you mean 'chain'"),
        (["mine", "--workload", "rica", "--dataset", "digits"], "expected --dataset patches"),
        (["mine", "--dataset", "patches"], "expected --dataset digits or fashion_mnist"),
        (["mine", "--fault", "meteor"], "meteor"),
        (["mine", "--seeds", "0"], "seeds"),
        (["mine", "--output", "no/folder.yaml"], "cannot be written"),
    ],
    ids=["space", "path", "strategy", "rica", "patches", "fault", "seeds", "folder"],
)
def test_bad_input_writes_nothing(tmp_path: Path, words: list[str], told: str) -> None:
    refused = dps(tmp_path, "new", *words)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert told in refused.stderr
    assert "Traceback" not in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_of_a_disk_without_space_no_half_a_file_is_left(tmp_path: Path) -> None:
    def leave_hardly_any() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    full = subprocess.run(
        [sys.executable, "-m", "flows.cli", "new", "mine"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=leave_hardly_any,
    )
    assert (full.returncode, full.stdout) == (2, "")
    assert "mine.yaml: cannot be written" in full.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_flags_the_file_has_the_defaults_and_the_flags_are_listed(tmp_path: Path) -> None:
    made = dps(tmp_path, "new", "mine")
    assert made.returncode == 0, made.stderr
    for flag in (
        "--workload,",
        "--data,",
        "--task,",
        "--recovery",
        "--fault",
        "--seeds",
        "--cluster",
    ):
        assert flag in made.stdout
    assert (tmp_path / "mine.yaml").read_text() == written("mine", Choices())
    assert "--recovery" not in dps(tmp_path, "new", "other", "--seeds", "2").stdout


def test_what_cannot_work_is_refused_before_it_is_written() -> None:
    with pytest.raises(ConfigurationError):
        load_trials(parse_document(written("a/b", Choices()).encode(), "mine.yaml"))
