"""The coordinator: membership, placement, rebalancing, checkpoints of all shards.

`shard_controller` decides what becomes of a shard, and begins its epochs.
"""
