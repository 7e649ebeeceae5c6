"""The profiles that come with dps: time costs of virtual nodes, with sources."""
