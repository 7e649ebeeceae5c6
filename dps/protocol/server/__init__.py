"""A server node: its replicas of shards, their commit logs, batching and reads."""
