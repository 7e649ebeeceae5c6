"""The section of a configuration that says on which kind of cluster trials run.

Sections say what was written; `open` gives the cluster, with the nodes that a trial needs. Each has
the `ways` in which its nodes can be killed, and a limit of the real time that a trial takes.
"""

from __future__ import annotations

import re
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
)

from dps.core.faults.plan import Way
from dps.errors import ConfigurationError
from flows.config.base import KIND_ALONE, Section, absolute, is_of_record
from flows.config.errors import refuse, refusing
from flows.config.profile import load_profile, shipped
from flows.config.tls import CertificateSection, Tls, security_of
from flows.quoting import quoted

if TYPE_CHECKING:
    from dps.cluster.backends.base import Cluster
    from dps.cluster.backends.jobqueue import JobGroup, Queue
    from dps.cluster.names import NodeSpec
    from dps.protocol.transport import Clock
    from dps.virtual.profile import Gradient

Tell = Callable[[str], None]
_AMOUNT = re.compile(r"[0-9]+(\.[0-9]+)? ?[kKMGT]i?B")
_ADDRESS = re.compile(r"[a-z]+://\S+:[0-9]+")


class _AnyCluster(Section):
    """What clusters of all kinds have in common.

    Attributes
    ----------
    shares_cores
        Whether trials that run at once may take the cores from each other, which takes time.
    starts_scheduler
        Whether each trial has a Dask scheduler of its own, so that another attempt has another one.
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
        """What computing a gradient takes where that is not measured but a model says it."""
        return None

    def real_limit(self, time_limit: float) -> tuple[float, str]:
        """Seconds of real time that a trial may take beside set-up and tear-down, and what for.

        Parameters
        ----------
        time_limit
            Of its training, in seconds of its own clock.
        """
        return time_limit, f"the time limit of {time_limit:g} s"

    def decisive(self, written: dict[str, Any]) -> dict[str, Any]:
        """Return what of the section, as it is recorded, a trial's results depend on.

        That is not for how long jobs may wait, nor where the certificates are.
        """
        kept = {key: value for key, value in written.items() if key != "patience"}
        return {**kept, "tls": self.tls if isinstance(self.tls, str) else "own"}


class _WaitedFor(_AnyCluster):
    """Nodes that others may have: they are waited for, for `patience` seconds."""

    patience: PositiveFloat = 600.0

    def real_limit(self, time_limit: float) -> tuple[float, str]:
        """Seconds of real time that a trial may train for and wait for nodes, and what for."""
        told = f"the time limit of {time_limit:g} s, {self.patience:g} s of waiting for nodes"
        return time_limit + self.patience, told


class LocalSection(_AnyCluster):
    """Fresh processes on this machine, for each trial."""

    ways: ClassVar[tuple[Way, ...]] = ("signal",)
    kind: Literal["local"] = "local"
    tls: Tls = "temporary"

    def decisive(self, written: dict[str, Any]) -> dict[str, Any]:
        """Return what of the section, as it is recorded, a trial's results depend on.

        A trial is the same with TLS and without, as it was before TLS was the default; that it had
        certificates of the user's own has always been told.
        """
        return super().decisive(written) if isinstance(self.tls, CertificateSection) else {}

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
    address: str | None = None

    @field_validator("address")
    @classmethod
    def _is_one(cls, address: str | None) -> str | None:
        if address is not None and not _ADDRESS.fullmatch(address):
            refuse(
                "expected the address of a Dask scheduler, tcp://10.0.0.1:8786; got "
                f"{quoted(address)}"
            )
        return address

    @field_validator("tls")
    @classmethod
    def _is_that_of_the_deployment(cls, tls: Tls) -> Tls:
        if tls == "temporary":
            refuse(
                "a deployment that is there has its certificates already; expected {ca_file: …, "
                "cert: …, key: …}, or off: those that Dask's own configuration names"
            )
        return tls

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

    @field_validator("tls")
    @classmethod
    def _is_off(cls, tls: Tls) -> Tls:
        if tls != "off":
            refuse("nothing is sent on virtual time that could be encrypted; expected off")
        return tls

    def decisive(self, written: dict[str, Any]) -> dict[str, Any]:
        """Return what of the section, as it is recorded, a trial's results depend on.

        That is what the profile says, not where it is kept; if it is gone, nobody can say it.
        """
        with suppress(ConfigurationError):
            costs = load_profile(self.profile).model_dump(mode="json", exclude={"sources"})
            return {"kind": self.kind, "profile": costs}
        return super().decisive(written)

    def real_limit(self, time_limit: float) -> tuple[float, str]:
        """Seconds of real time that a trial may compute for, whatever its own clock says."""
        return self.patience, f"{self.patience:g} s of computing, by cluster.patience"

    @property
    def clock(self) -> Clock:
        """The clock that a record begins with: that of a simulation that has not begun."""
        from dps.virtual.platform import Beginning

        return Beginning()

    @property
    def gradient(self) -> Gradient:
        """What computing a gradient takes."""
        return load_profile(self.profile).build().gradient

    def open(
        self, nodes: Sequence[NodeSpec], preload: Sequence[str], tell: Tell, seed: int = 0
    ) -> Cluster:
        """Make the nodes; what happens by chance is drawn from the seed."""
        from dps.virtual.client import VirtualClient
        from dps.virtual.cluster import VirtualNodes

        return VirtualNodes(VirtualClient(nodes, seed, load_profile(self.profile).build()))


class JobSection(Section):
    """What jobs ask for; what is not given is as `jobqueue.yaml` says.

    `directives` are lines for the head of the job script, without their prefix.
    """

    queue: str | None = None
    cores: PositiveInt | None = None
    memory: str | None = None
    walltime: str | None = None
    directives: Annotated[tuple[str, ...], Field(strict=False)] | None = None

    @field_validator("memory")
    @classmethod
    def _is_an_amount(cls, memory: str | None) -> str | None:
        if memory is not None and not _AMOUNT.fullmatch(memory):
            refuse(f"expected an amount of memory, such as 2GB; got {quoted(memory)}")
        return memory

    def asked(self) -> dict[str, Any]:
        """What is given, by its name."""
        known = {name: getattr(self, name) for name in JobSection.model_fields}
        return {name: value for name, value in known.items() if value is not None}


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
        from dps.cluster.backends.slurm_jobs import SlurmCluster

        groups = {node.resource: self.group(node.resource) for node in nodes}
        rest = groups, nodes, self.interface, security_of(self.tls), self.patience, tell
        return SlurmCluster(*rest) if self.kind == "slurm" else JobCluster(self.queueing, *rest)

    def check(self, nodes: Sequence[NodeSpec]) -> None:
        """Refuse jobs that could not even be submitted; raises `ConfigurationError`."""
        from dps.cluster.backends.jobqueue import address_on, check_submits, interface_of

        self.scripts(nodes)
        check_submits(self.queueing)
        address_on(self.interface or interface_of(self.queueing))
        security_of(self.tls)

    @property
    def ways(self) -> tuple[Way, ...]:
        """How nodes can be killed."""
        return get_args(Way) if self.kind == "slurm" else ("signal",)

    @property
    def queueing(self) -> Queue:
        """The queueing system."""
        from dps.cluster.backends.jobqueue import QUEUES

        return QUEUES[self.kind]

    def group(self, role: str) -> JobGroup:
        """Return what the jobs of a role ask for."""
        from dps.cluster.backends.jobqueue import JobGroup

        own = {str(name): section for name, section in self.groups.items()}.get(role)
        return JobGroup(**{**self.asked(), **(own.asked() if own is not None else {})})

    def scripts(self, nodes: Sequence[NodeSpec]) -> dict[str, str]:
        """Return a job script for each role, with the first node of it for an example."""
        from dps.cluster.backends.jobqueue import script_of

        encrypted = self.tls != "off"
        firsts = {node.resource: node for node in reversed(nodes)}
        return {
            role: script_of(self.queueing, self.group(role), node, self.interface, encrypted)
            for role, node in sorted(firsts.items())
        }


def _here_if_nothing_is_said(cluster: Any) -> Any:
    return {"kind": "local", **cluster} if isinstance(cluster, dict) else cluster


ClusterSection = Annotated[
    Annotated[
        LocalSection | ExistingSection | QueueSection | VirtualSection, Field(discriminator="kind")
    ],
    BeforeValidator(_here_if_nothing_is_said),
    KIND_ALONE,
]
