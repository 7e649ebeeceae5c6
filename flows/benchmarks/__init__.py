"""Measurements of dps itself: transport, overhead, recovery, elasticity, sparse tables."""
