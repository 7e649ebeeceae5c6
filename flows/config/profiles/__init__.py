"""The profiles that come with dps: what costs how much time on virtual nodes, with sources."""
