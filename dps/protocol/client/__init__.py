"""A client of the shards: routing, one client per shard, encoding of gradients, offered copies."""
