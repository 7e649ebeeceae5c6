"""Benchmarks of dps itself; they live in the repository only."""
