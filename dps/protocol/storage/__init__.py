"""Where shard state survives: checkpoint files, the state store, and what restores from them."""
