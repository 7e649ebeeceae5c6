"""The section of a configuration that selects the kind of cluster on which trials run.

A section holds the settings; `open` returns the cluster, with the nodes that a trial needs. Each
has the `ways` in which its nodes can be killed, and a limit of the real time that a trial takes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from dps.errors import ConfigurationError
from dps.faults import Way
from flows.config.errors import refuse, refusing
from flows.config.profile import load_profile, shipped
from flows.config.sections import Group, InputPath, Section, absolute, is_of_record, like
from flows.quoting import quoted

if TYPE_CHECKING:
    from distributed.security import Security

    from dps.cluster.backends.base import Cluster
    from dps.cluster.backends.jobs import Jobs
    from dps.cluster.names import NodeSpec
    from dps.protocol.transport import Clock
    from dps.virtual.profile import Gradient

Notify = Callable[[str], None]


class CertificateSection(Section):
    """Your own certificate: files in PEM format."""

    ca_file: InputPath
    """Certificates of the authority."""
    cert: InputPath
    """Certificate of all processes."""
    key: InputPath | None = None
    """Private key; `null`: in the file of `cert`."""

    @model_validator(mode="after")
    def _go_together(self, info: ValidationInfo) -> CertificateSection:
        if is_of_record(info):
            return self
        try:
            self.build()
        except ConfigurationError as error:
            key, _, reason = str(error).partition(": ")
            refuse(reason, key=key)
        return self

    def build(self) -> Security:
        """Return the certificate for all processes of a cluster."""
        return from_files(self.ca_file, self.cert, self.key)


def from_files(ca_file: str, cert: str, key: str | None = None) -> Security:
    """Return a certificate of the user's own for all processes of a cluster.

    Any certificate that an authority of `ca_file` has signed is accepted. Without a `key`, the
    private key is in `cert`. Raises `ConfigurationError` if a file cannot be read, or they do not
    go together; the message begins with the parameter that is wrong.
    """
    given = {"ca_file": ca_file, "cert": cert, **({"key": key} if key is not None else {})}
    paths = {name: os.path.abspath(path) for name, path in given.items()}
    for name, path in paths.items():
        # A device or a named pipe would be read for ever.
        if not os.path.isfile(path) or not os.access(path, os.R_OK):
            there = "cannot be read" if os.path.exists(path) else "no such file"
            raise ConfigurationError(f"{name}: {path}: {there}; expected a file in PEM format")
    from dps.cluster.backends.tls import for_all

    security = for_all(paths["ca_file"], paths["cert"], paths.get("key"))
    try:
        security.get_listen_args("scheduler")
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"cert: {', '.join(paths.values())}: expected an authority with its certificate "
            f"and private key, in PEM format: {error}"
        ) from error
    return security


def _tls(*words: str) -> BeforeValidator:
    def check(tls: Any, info: ValidationInfo) -> Any:
        if isinstance(tls, dict):
            return CertificateSection.model_validate(tls, context=info.context)
        tls = "off" if tls is False else tls  # how YAML reads an off without quotes
        if tls not in words and not isinstance(tls, CertificateSection):
            own = "{ca_file: …, cert: …, key: …}"
            refuse(f"expected {', '.join(words)}, or {own}; got {quoted(tls)}")
        return tls

    forms = Literal[(*words, False)] | CertificateSection  # type: ignore[valid-type]
    return BeforeValidator(check, json_schema_input_type=forms)


_ABOUT_TLS = Field(
    description="`off`: as Dask is configured; `temporary`: a certificate for each trial; or your "
    "own certificate."
)
Tls = Annotated[
    Literal["off", "temporary"] | CertificateSection, _tls("off", "temporary"), _ABOUT_TLS
]
# Without a certificate for each trial, for what there is before it.
TlsOfOthers = Annotated[Literal["off"] | CertificateSection, _tls("off"), _ABOUT_TLS]


def security_of(tls: Tls) -> Security | None:
    """Return what the processes of a cluster know each other by; None: Dask's configuration."""
    if isinstance(tls, CertificateSection):
        return tls.build()
    if tls == "off":
        return None
    from dps.cluster.backends.tls import temporary

    return temporary()


class _AnyCluster(Section):
    """Common part of clusters of all kinds.

    Attributes
    ----------
    shares_cores
        Whether concurrent trials may compete for cores, which slows them down.
    starts_scheduler
        Whether each attempt at a trial starts its own Dask scheduler.
    """

    shares_cores: ClassVar[bool] = True
    starts_scheduler: ClassVar[bool] = True
    tls: Tls = "off"

    @property
    def clock(self) -> Clock:
        """The clock that a record begins with."""
        from dps.cluster.platform import SystemClock

        return SystemClock()

    @property
    def gradient(self) -> Gradient | None:
        """The modelled cost of computing a gradient; None where the real time counts."""
        return None

    def real_limit(self, time_limit: float) -> float:
        """Return the limit of the real time of a trial without set-up and tear-down, in seconds."""
        return time_limit

    def decisive(self, written: dict[str, Any]) -> dict[str, Any]:
        """Return the recorded settings of the section on which a trial's results depend.

        They exclude how long jobs may wait, and the paths of certificates.
        """
        kept = {key: value for key, value in written.items() if key != "patience"}
        return {**kept, "tls": self.tls if isinstance(self.tls, str) else "own"}


class _WaitedFor(_AnyCluster):
    """Nodes that may be busy or queued at first."""

    patience: PositiveFloat = 600.0
    """Seconds to wait for nodes."""

    def real_limit(self, time_limit: float) -> float:
        """Return the limit in seconds of real time for training and for waiting for nodes."""
        return time_limit + self.patience


class LocalSection(_AnyCluster):
    """Fresh processes on this machine, for each trial."""

    ways: ClassVar[tuple[Way, ...]] = ("signal",)
    kind: Literal["local"] = "local"
    tls: Tls = "temporary"

    def open(
        self, nodes: Sequence[NodeSpec], preload: Sequence[str], notify: Notify, seed: int = 0
    ) -> Cluster:
        """Start the nodes; `preload` are the modules that they need."""
        from dps.cluster.backends.local import LocalCluster

        return LocalCluster(
            nodes,
            preload,
            dashboard=self.tls != "temporary",  # a browser would need its certificate
            security=security_of(self.tls) or "off",
            notify=lambda line: notify(f"warning: {line} (cluster.tls: off)"),
        )


class ExistingSection(_WaitedFor):
    """Dask workers of an existing deployment."""

    starts_scheduler: ClassVar[bool] = False
    ways: ClassVar[tuple[Way, ...]] = ("signal",)
    kind: Literal["existing"]
    address: (
        Annotated[
            str,
            like(r"^[a-z]+://\S+:[0-9]+$", "the address of a Dask scheduler, tcp://10.0.0.1:8786"),
        ]
        | None
    ) = None
    """Address of the Dask scheduler; `null`: from Dask's configuration."""
    tls: TlsOfOthers = "off"

    def open(
        self, nodes: Sequence[NodeSpec], preload: Sequence[str], notify: Notify, seed: int = 0
    ) -> Cluster:
        """Find a Dask worker for each node; they import what they need when they need it."""
        from dps.cluster.backends.existing import ExistingCluster

        return ExistingCluster(self.address, nodes, security_of(self.tls), self.patience, notify)


class VirtualSection(_AnyCluster):
    """Simulated nodes on virtual time, in one process."""

    shares_cores: ClassVar[bool] = False
    starts_scheduler: ClassVar[bool] = False
    ways: ClassVar[tuple[Way, ...]] = ("signal",)
    kind: Literal["virtual"]
    profile: str = "laptop"
    """Time costs: `laptop`, `cluster-25gbit` or a file."""
    patience: PositiveFloat = 1800.0
    """Real seconds for which a trial may compute."""
    tls: Annotated[Literal["off"], _tls("off")] = "off"
    """Nothing is sent."""

    @field_validator("profile", mode="before")
    @classmethod
    def _absolute_if_it_is_a_file(cls, profile: Any, info: ValidationInfo) -> Any:
        if not isinstance(profile, str) or profile in shipped():
            return profile
        path = absolute(profile, info)
        return path if Path(path).is_file() else profile

    @field_validator("profile")
    @classmethod
    def _is_one(cls, profile: str, info: ValidationInfo) -> str:
        if not is_of_record(info):
            with refusing():
                load_profile(profile)
        return profile

    def decisive(self, written: dict[str, Any]) -> dict[str, Any]:
        """Return the recorded settings of the section on which a trial's results depend.

        They are the profile's costs, not its path, unless the profile can no longer be read.
        """
        with suppress(ConfigurationError):
            costs = load_profile(self.profile).model_dump(mode="json", exclude={"sources"})
            return {"kind": self.kind, "profile": costs}
        return super().decisive(written)

    def real_limit(self, time_limit: float) -> float:
        """Return the real seconds for which a trial may compute, regardless of virtual time."""
        return self.patience

    @property
    def clock(self) -> Clock:
        """The clock that a record begins with: that of a simulation that has not begun."""
        from dps.virtual.loop import VirtualClock

        return VirtualClock()

    @property
    def gradient(self) -> Gradient:
        """The time to compute a gradient."""
        return load_profile(self.profile).build().gradient

    def open(
        self, nodes: Sequence[NodeSpec], preload: Sequence[str], notify: Notify, seed: int = 0
    ) -> Cluster:
        """Make the nodes; the seed determines all random events."""
        from dps.virtual.client import VirtualClient

        return VirtualClient(nodes, seed, load_profile(self.profile).build())


class JobSection(Section):
    """Resources of a job; others are as in `jobqueue.yaml`."""

    queue: str | None = None
    """Queue or partition."""
    cores: PositiveInt | None = None
    """Cores per job."""
    memory: (
        Annotated[
            str,
            like(r"^[0-9]+(\.[0-9]+)? ?[kKMGT]i?B$", "an amount of memory, such as 2GB"),
        ]
        | None
    ) = None
    """Memory per job, such as `2GB`."""
    walltime: str | None = None
    """Time limit of a job."""
    directives: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """Lines of the job script's head, without their prefix."""

    @model_validator(mode="before")
    @classmethod
    def _no_partition(cls, data: Any) -> Any:
        if isinstance(data, dict) and "partition" in data:
            refuse("unknown key; use 'queue', which is a partition of Slurm", key="partition")
        return data

    def asked(self) -> dict[str, Any]:
        """The given values, by name."""
        return self.model_dump(include=set(JobSection.model_fields), exclude_none=True)


class QueueSection(JobSection, _WaitedFor):
    """A job of a queueing system for each node."""

    kind: Literal["slurm", "pbs", "lsf", "sge"]
    groups: dict[Literal["server", "store", "worker", "evaluator"], JobSection] = Field(
        default_factory=dict
    )
    """Other settings for the jobs of a role."""
    interface: str | None = None
    """Network interface."""
    tls: Tls = "temporary"

    def open(
        self, nodes: Sequence[NodeSpec], preload: Sequence[str], notify: Notify, seed: int = 0
    ) -> Cluster:
        """Submit a job for each node, and wait until all have joined."""
        from dps.cluster.backends.jobs import JobCluster
        from dps.cluster.backends.slurm import SlurmCluster

        open_cluster = SlurmCluster if self.kind == "slurm" else JobCluster
        security = security_of(self.tls)
        return open_cluster(self._jobs(nodes), nodes, security, self.patience, notify)

    def check(self, nodes: Sequence[NodeSpec]) -> None:
        """Refuse jobs that could not even be submitted; raises `ConfigurationError`."""
        self.scripts(nodes)
        jobs = self._jobs(nodes)
        command = shlex.split(jobs.job_class().submit_command)[0]
        if shutil.which(command) is None:
            raise ConfigurationError(
                f"{command}, which submits jobs of {self.kind}, is not installed; run dps on a "
                "machine that can submit jobs"
            )
        jobs.host()
        security_of(self.tls)

    @property
    def ways(self) -> tuple[Way, ...]:
        """How nodes can be killed."""
        return get_args(Way) if self.kind == "slurm" else ("signal",)

    def cores_asked(self, nodes: Sequence[NodeSpec]) -> int:
        """Return how many cores the jobs of some nodes ask for in all."""
        jobs = self._jobs(nodes)
        return sum(jobs.options(node)["cores"] for node in nodes)

    def scripts(self, nodes: Sequence[NodeSpec]) -> dict[str, str]:
        """Return a job script for each role, with the first node of it for an example."""
        from distributed.security import Security

        from dps.cluster.backends.jobs import LOGS

        address, security = "tcp://SCHEDULER:PORT", Security()
        if self.tls != "off":
            names = ("ca_file", "worker_cert", "worker_key")
            files = {f"tls_{name}": f"FOLDER/{name}" for name in names}
            address, security = "tls://SCHEDULER:PORT", Security(require_encryption=True, **files)
        jobs, firsts = self._jobs(nodes), {node.resource: node for node in reversed(nodes)}
        scripts = {
            role: jobs.job(node, address, security).job_script()
            for role, node in sorted(firsts.items())
        }
        with suppress(OSError):  # created for jobs, which are not submitted
            os.rmdir(LOGS)
        return scripts

    def _jobs(self, nodes: Sequence[NodeSpec]) -> Jobs:
        from dps.cluster.backends.jobs import Jobs

        own = {str(role): section.asked() for role, section in self.groups.items()}
        groups = {node.resource: self.asked() | own.get(node.resource, {}) for node in nodes}
        return Jobs(self.kind, groups, self.interface)


def _here_if_nothing_is_said(cluster: Any) -> Any:
    return {"kind": "local", **cluster} if isinstance(cluster, dict) else cluster


ClusterSection = Annotated[
    LocalSection | ExistingSection | QueueSection | VirtualSection,
    Group(()),
    BeforeValidator(_here_if_nothing_is_said),
]
