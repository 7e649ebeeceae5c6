"""The workload of simulated workers: counters whose weights show every update."""
