"""Job scripts of a configuration: groups, defaults of the user's own, and what is left alone."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from distributed.security import Security

from dps.cluster.backends.jobs import Jobs
from dps.cluster.names import NodeSpec
from dps.errors import ConfigurationError
from flows.config.experiment import ExperimentConfig, load_experiment
from flows.config.trials import expand
from tests.support.commands import dps

needs_jobqueue = pytest.mark.skipif(
    find_spec("dask_jobqueue") is None, reason="the extra `jobqueue` is not installed"
)

CONFIG: dict[str, Any] = {
    "experiment": "jobs",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"workers": 4, "workers_per_node": 2, "updates": 120},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "recovery": "chain",
}
GROUPS: dict[str, Any] = {
    "queue": "compute",
    "memory": "2GB",
    "groups": {"server": {"queue": "ps", "directives": ["--constraint=fast"]}},
}


def scripts(here: Path, cluster: Any, dask: Any = None) -> subprocess.CompletedProcess[str]:
    """Plan in a home directory of its own, where Dask is configured like this."""
    home = here / "home"
    settings = home / ".config" / "dask"
    settings.mkdir(parents=True)
    if dask is not None:
        (settings / "jobqueue.yaml").write_text(yaml.safe_dump(dask))
    (here / "jobs.yaml").write_text(yaml.safe_dump({**CONFIG, "cluster": cluster}))
    done = dps(here, "plan", "jobs.yaml", "--job-script", HOME=str(home))
    assert not (here / "job-logs").exists()
    left = [path.name for path in settings.iterdir()]
    assert left == ([] if dask is None else ["jobqueue.yaml"])
    return done


@pytest.mark.slow
@needs_jobqueue
def test_each_group_has_a_job_script_of_its_own(tmp_path: Path) -> None:
    done = scripts(tmp_path, {"kind": "slurm", **GROUPS})
    assert done.returncode == 0, done.stderr
    head, *parts = done.stdout.split("# -- ")
    assert head == ""
    found = dict(part.split(" --\n", 1) for part in parts)
    assert found.keys() == {"server", "worker", "evaluator"}
    assert "#SBATCH -p ps\n" in found["server"]
    assert "#SBATCH --constraint=fast\n" in found["server"]
    assert "#SBATCH -p compute\n" in found["worker"]
    assert "--constraint" not in found["worker"]
    assert "tls://SCHEDULER:PORT --name server-0$DPS_AGAIN" in found["server"]
    assert "#SBATCH --no-requeue\n" in found["server"]
    assert "#SBATCH -o job-logs/" in found["server"]
    assert "--tls-key FOLDER/worker_key" in found["server"]
    served = "export DASK_DISTRIBUTED__SCHEDULER__DASHBOARD__TLS__KEY=FOLDER/worker_key\n"
    assert served in found["server"], "its pages are served with its certificate"
    assert "--nthreads 1 --memory-limit 0 --no-dashboard --resources server=1" in found["server"]
    assert "--nthreads 2 --memory-limit 0 --no-dashboard --resources worker=2" in found["worker"]
    for script in found.values():
        assert " --no-nanny --death-timeout 60 " in script
    assert "export OMP_NUM_THREADS=1\n" in found["worker"]
    assert "export DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT=2s\n" in found["worker"]


@pytest.mark.slow
@needs_jobqueue
@pytest.mark.parametrize(
    ("kind", "prefix"), [("slurm", "#SBATCH"), ("pbs", "#PBS"), ("lsf", "#BSUB"), ("sge", "#$")]
)
def test_what_is_not_given_is_as_the_user_has_configured_dask(
    tmp_path: Path, kind: str, prefix: str
) -> None:
    own = {"queue": "mine", "cores": 3, "memory": "4GB", "job-script-prologue": ["module load x"]}
    done = scripts(tmp_path, {"kind": kind}, {"jobqueue": {kind: own}})
    assert done.returncode == 0, done.stderr
    assert f"{prefix} " in done.stdout
    assert " mine\n" in done.stdout
    assert "module load x\n" in done.stdout


@pytest.mark.slow
@needs_jobqueue
@pytest.mark.parametrize(
    ("kind", "own", "asked"),
    [
        ("pbs", {"resource-spec": "select=1:ncpus=24:mem=96GB"}, "ncpus=4"),
        ("slurm", {"job-cpu": 24, "job-mem": "96GB"}, "--cpus-per-task=4"),
    ],
)
def test_what_a_group_asks_for_goes_before_what_the_site_has(
    tmp_path: Path, kind: str, own: dict[str, Any], asked: str
) -> None:
    cluster = {"kind": kind, "cores": 4, "memory": "8GB"}
    done = scripts(tmp_path, cluster, {"jobqueue": {kind: own}})
    assert done.returncode == 0, done.stderr
    assert asked in done.stdout
    assert "96" not in done.stdout


@needs_jobqueue
def test_certificates_may_have_their_key_with_them_and_lie_anywhere() -> None:
    files = {"tls_ca_file": "/our files/ca.pem", "tls_worker_cert": "/our files/own.pem"}
    security = Security(require_encryption=True, **files)
    jobs = Jobs("slurm", {"worker": {"memory": "1GB"}})
    job = jobs.job(NodeSpec("worker-0", "worker"), "tls://10.0.0.1:8786", security)
    assert "--tls-cert '/our files/own.pem' --tls-key '/our files/own.pem'" in job.job_script()


@pytest.mark.slow
@needs_jobqueue
def test_a_machine_that_cannot_submit_jobs_is_told_before_anything_runs(tmp_path: Path) -> None:
    cluster = {"kind": "sge", "memory": "1GB"}
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump({**CONFIG, "cluster": cluster}))
    done = dps(tmp_path, "run", "jobs.yaml", PATH="")
    assert done.returncode == 2
    assert "qsub, which submits jobs of sge, is not installed" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
@needs_jobqueue
@pytest.mark.parametrize(
    ("kind", "told"),
    [("slurm", "cluster.memory"), ("local", "expected slurm, pbs, lsf or sge")],
)
def test_there_is_no_job_script_without_memory_or_for_this_machine(
    tmp_path: Path, kind: str, told: str
) -> None:
    done = scripts(tmp_path, {"kind": kind})
    assert done.returncode == 2
    assert told in done.stderr


def test_how_long_jobs_may_wait_makes_no_other_trial(tmp_path: Path) -> None:
    def digest(**changes: Any) -> str:
        cluster = {"kind": "slurm", "memory": "1GB", **changes}
        (trial,) = expand(ExperimentConfig.model_validate({**CONFIG, "cluster": cluster}))
        return trial.digest

    assert digest(patience=5.0) == digest() != digest(cores=2)


@pytest.mark.parametrize(
    ("cluster", "told"),
    [({"memory": "much"}, "cluster.memory.*2GB"), ({"groups": {"servers": {}}}, "groups")],
)
def test_what_no_job_can_be_is_refused(tmp_path: Path, cluster: Any, told: str) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "cluster": {"kind": "slurm", **cluster}}))
    with pytest.raises(ConfigurationError, match=told):
        load_experiment(str(path))
