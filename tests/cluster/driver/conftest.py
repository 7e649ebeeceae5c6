"""The clusters that all tests of this folder share."""

from tests.support.clusters import client, four_nodes, plain, with_roles

__all__ = ["client", "four_nodes", "plain", "with_roles"]
