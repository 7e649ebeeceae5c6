"""How what runs on a node calls others of its group: by what was chosen, and recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dps.cluster.platform import platform_of
from dps.cluster.transport.calls import ClusterTransport, Meter
from dps.cluster.transport.links import links_of
from dps.cluster.transport.port import port_of
from dps.events import Connected, Sink
from dps.protocol.group import Group

if TYPE_CHECKING:
    import distributed


def transport_of(
    dask_worker: distributed.Worker, group: Group, node: str, meter: Meter, emit: Sink
) -> ClusterTransport:
    """The transport of one member of a group on a node; the port has to be entered for it."""

    clock = platform_of(dask_worker).clock

    def on_connected(peer: str, transport: str, why: str) -> None:
        emit(Connected(clock.now(), node, peer, transport, why))

    links = links_of(dask_worker)
    if group.transport == "dask":
        return ClusterTransport(dask_worker.rpc, meter, links, on_connected=on_connected)
    port = port_of(dask_worker)
    return ClusterTransport(dask_worker.rpc, meter, links, port, group.transport, on_connected)
