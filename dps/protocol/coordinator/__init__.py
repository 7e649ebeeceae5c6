"""The coordinator: membership, epochs, placement, rebalancing, checkpoints of all shards."""
