"""Owns the section of a configuration that says on which kind of cluster trials run.

Sections say what was written; `open` gives the cluster, with the nodes that a trial needs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from flows.sections import Section, refuse

if TYPE_CHECKING:
    from dps.cluster.kinds import Cluster
    from dps.cluster.local import NodeSpec

_ADDRESS = re.compile(r"[a-z]+://\S+:\d+")


class LocalSection(Section):
    """Fresh processes on this machine, for each trial."""

    kind: Literal["local"] = "local"

    def open(self, nodes: Sequence[NodeSpec], preload: Sequence[str]) -> Cluster:
        """Start the nodes; `preload` are the modules that they need."""
        from dps.cluster.local import LocalCluster

        return LocalCluster(nodes, preload, dashboard=True)


class ExistingSection(Section):
    """Dask workers of a deployment that is there already, by the address of its scheduler.

    null: the address that Dask's own configuration names, as in DASK_SCHEDULER_ADDRESS.
    """

    kind: Literal["existing"]
    address: str | None = None

    @field_validator("address")
    @classmethod
    def _is_one(cls, address: str | None) -> str | None:
        if address is not None and not _ADDRESS.fullmatch(address):
            refuse(
                f"expected the address of a Dask scheduler, tcp://10.0.0.1:8786; got {address!r}"
            )
        return address

    def open(self, nodes: Sequence[NodeSpec], preload: Sequence[str]) -> Cluster:
        """Find a Dask worker for each node; they import what they need when they need it."""
        from dps.cluster.existing import ExistingCluster

        return ExistingCluster(self.address, nodes)


ClusterSection = Annotated[LocalSection | ExistingSection, Field(discriminator="kind")]
