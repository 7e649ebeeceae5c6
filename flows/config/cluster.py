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

Tell = Callable[[str], None]


class CertificateSection(Section):
    """Your own certificate: files in PEM format; the key may be in the file of `cert`."""

    ca_file: InputPath
    cert: InputPath
    key: InputPath | None = None

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

    Parameters
    ----------
    ca_file
        The certificates of the authority; any certificate that it has signed is accepted.
    cert, key
        The certificate, and its private key unless that is in the same file.

    Raises
    ------
    ConfigurationError
        One of the files cannot be read, or they do not go together; the message begins with the
        parameter that is wrong.
    """
    given = {"ca_file": ca_file, "cert": cert, **({"key": key} if key is not None else {})}
    paths = {name: os.path.abspath(path) for name, path in given.items()}
    for name, path in paths.items():
        # A device or a named pipe would be read for ever.
        if not os.path.isfile(path) or not os.access(path, os.R_OK):
            there = "cannot be read" if os.path.exists(path) else "there is no such file"
            raise ConfigurationError(f"{name}: {path}: {there}; expected a file in PEM format")
    from dps.cluster.backends.tls import for_all

    security = for_all(paths["ca_file"], paths["cert"], paths.get("key"))
    try:
        security.get_listen_args("scheduler")
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"cert: {', '.join(paths.values())}: these are no authority, certificate and private "
            f"key in PEM format that go together: {error}"
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

    forms = Literal["off", "temporary", False] | CertificateSection
    return BeforeValidator(check, json_schema_input_type=forms)


# How processes know each other. `temporary` makes a certificate for each trial. With `off`, Dask's
# own configuration decides, which is no TLS unless it requires encryption.
Tls = Annotated[Literal["off", "temporary"] | CertificateSection, _tls("off", "temporary")]
# Without a certificate for each trial, for what there is before it.
TlsOfOthers = Annotated[Literal["off"] | CertificateSection, _tls("off")]


def security_of(tls: Tls) -> Security | None:
    """Return what the processes of a cluster know each other by; None: Dask's configuration."""
    if isinstance(tls, CertificateSection):
        return tls.build()
    if tls == "off":
        return None
    from dps.cluster.backends.tls import temporary

    return temporary()


class _AnyCluster(Section):
    """What clusters of all kinds have in common.

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
        """Return the limit in seconds of real time of a trial, without set-up and tear-down.

        Parameters
        ----------
        time_limit
            Limit of its training, in seconds of its own clock.
        """
        return time_limit

    def decisive(self, written: dict[str, Any]) -> dict[str, Any]:
        """Return the recorded settings of the section on which a trial's results depend.

        They exclude how long jobs may wait, and the paths of certificates.
        """
        kept = {key: value for key, value in written.items() if key != "patience"}
        return {**kept, "tls": self.tls if isinstance(self.tls, str) else "own"}


class _WaitedFor(_AnyCluster):
    """Nodes that others may have: they are waited for, for `patience` seconds."""

    patience: PositiveFloat = 600.0

    def real_limit(self, time_limit: float) -> float:
        """Return the limit in seconds of real time for training and for waiting for nodes."""
        return time_limit + self.patience


class LocalSection(_AnyCluster):
    """Fresh processes on this machine, for each trial."""

    ways: ClassVar[tuple[Way, ...]] = ("signal",)
    kind: Literal["local"] = "local"
    tls: Tls = "temporary"

    def open(
        self, nodes: Sequence[NodeSpec], preload: Sequence[str], tell: Tell, seed: int = 0
    ) -> Cluster:
        """Start the nodes; `preload` are the modules that they need."""
        from dps.cluster.backends.local import LocalCluster

        return LocalCluster(
            nodes,
            preload,
            dashboard=self.tls != "temporary",  # a browser would need its certificate
            security=security_of(self.tls) or "off",
            tell=lambda line: tell(f"warning: {line} (cluster.tls: off)"),
        )


class ExistingSection(_WaitedFor):
    """Dask workers of a deployment that is there already, by the address of its scheduler.

    null: the address that Dask's own configuration names, as in DASK_SCHEDULER_ADDRESS. Those that
    other trials have are waited for, for `patience` seconds.
    """

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
    tls: TlsOfOthers = "off"

    def open(
        self, nodes: Sequence[NodeSpec], preload: Sequence[str], tell: Tell, seed: int = 0
    ) -> Cluster:
        """Find a Dask worker for each node; they import what they need when they need it."""
        from dps.cluster.backends.existing import ExistingCluster

        return ExistingCluster(self.address, nodes, security_of(self.tls), self.patience, tell)


class VirtualSection(_AnyCluster):
    """Nodes on virtual time, in one process: what costs how much time says a `profile`.

    That is one that comes with dps, by its name, or a YAML file. A trial that has computed for
    `patience` seconds of real time is given up.
    """

    shares_cores: ClassVar[bool] = False
    starts_scheduler: ClassVar[bool] = False
    ways: ClassVar[tuple[Way, ...]] = ("signal",)
    kind: Literal["virtual"]
    profile: str = "laptop"
    patience: PositiveFloat = 1800.0
    tls: Annotated[Literal["off"], _tls("off")] = "off"  # nothing is sent

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
        """What computing a gradient takes."""
        return load_profile(self.profile).build().gradient

    def open(
        self, nodes: Sequence[NodeSpec], preload: Sequence[str], tell: Tell, seed: int = 0
    ) -> Cluster:
        """Make the nodes; what happens by chance is drawn from the seed."""
        from dps.virtual.client import VirtualClient

        return VirtualClient(nodes, seed, load_profile(self.profile).build())


class JobSection(Section):
    """What jobs ask for; what is not given is as `jobqueue.yaml` says.

    `directives` are lines for the head of the job script, without their prefix.
    """

    queue: str | None = None
    cores: PositiveInt | None = None
    memory: (
        Annotated[
            str,
            like(r"^[0-9]+(\.[0-9]+)? ?[kKMGT]i?B$", "an amount of memory, such as 2GB"),
        ]
        | None
    ) = None
    walltime: str | None = None
    directives: Annotated[tuple[str, ...], Field(strict=False)] | None = None

    def asked(self) -> dict[str, Any]:
        """What is given, by its name."""
        return self.model_dump(include=set(JobSection.model_fields), exclude_none=True)


class QueueSection(JobSection, _WaitedFor):
    """A job for each node; `groups` are by role, and say what is different from the rest.

    Jobs may wait in the queue for `patience` seconds.
    """

    kind: Literal["slurm", "pbs", "lsf", "sge"]
    groups: dict[Literal["server", "store", "worker", "evaluator"], JobSection] = Field(
        default_factory=dict
    )
    interface: str | None = None
    tls: Tls = "temporary"

    def open(
        self, nodes: Sequence[NodeSpec], preload: Sequence[str], tell: Tell, seed: int = 0
    ) -> Cluster:
        """Submit a job for each node, and wait until all have joined."""
        from dps.cluster.backends.jobs import JobCluster
        from dps.cluster.backends.slurm import SlurmCluster

        open_cluster = SlurmCluster if self.kind == "slurm" else JobCluster
        security = security_of(self.tls)
        return open_cluster(self._jobs(nodes), nodes, security, self.patience, tell)

    def check(self, nodes: Sequence[NodeSpec]) -> None:
        """Refuse jobs that could not even be submitted; raises `ConfigurationError`."""
        self.scripts(nodes)
        jobs = self._jobs(nodes)
        command = shlex.split(jobs.job_class().submit_command)[0]
        if shutil.which(command) is None:
            raise ConfigurationError(
                f"jobs of {self.kind} are submitted with {command}, which is not there; run dps on "
                "a machine from which jobs can be submitted"
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
