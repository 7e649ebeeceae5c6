"""How long jobs may run, as queueing systems write it."""

from __future__ import annotations

import pytest

from dps.cluster.backends.jobs import lifetime_options

HOUR = 3600.0


@pytest.mark.parametrize(
    ("kind", "walltime", "seconds"),
    [
        ("slurm", "01:00:00", HOUR),
        ("slurm", "30:00", HOUR / 2),
        ("slurm", "60", HOUR),
        ("slurm", "1-0", 24 * HOUR),
        ("slurm", "1-01:30", 25.5 * HOUR),
        ("slurm", "2-00:00:30", 48 * HOUR + 30),
        ("slurm", "UNLIMITED", None),
        ("slurm", "1:2:3:4", None),
        ("pbs", "3600", HOUR),
        ("pbs", "01:00:00", HOUR),
        ("sge", "00:30:00", HOUR / 2),
        ("lsf", "60", HOUR),
        ("lsf", "01:00", HOUR),
        ("lsf", "01:00:00", HOUR),
    ],
)
def test_walltimes_are_read_as_the_queueing_system_does(
    kind: str, walltime: str, seconds: float | None
) -> None:
    same = lifetime_options("pbs", f"{seconds:.0f}") if seconds is not None else ()
    assert lifetime_options(kind, walltime) == same


def test_a_nodes_lifetime_ends_before_its_job_does() -> None:
    assert lifetime_options("slurm", "1:00") == ("--lifetime", "54s", "--lifetime-stagger", "3s")
    day = lifetime_options("slurm", "1-0")
    assert day == ("--lifetime", "85800s", "--lifetime-stagger", "300s")
    assert lifetime_options("slurm", None) == lifetime_options("slurm", "UNLIMITED") == ()
