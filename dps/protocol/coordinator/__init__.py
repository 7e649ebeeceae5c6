"""The coordinator: liveness of processes, placement of shards, and losses after failures."""
