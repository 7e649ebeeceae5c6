"""The client: routing, a client for each shard, encoding of gradients, and what was read."""
