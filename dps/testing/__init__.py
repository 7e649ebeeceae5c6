"""A virtual cluster with faults, for tests of your own training."""

from dps.testing.faults import Cut, Delay, Kill, Pause, Slow
from dps.testing.virtual_cluster import VirtualCluster

__all__ = ["Cut", "Delay", "Kill", "Pause", "Slow", "VirtualCluster"]
