"""Where things are: blocks on shards, and replicas of shards on hosts."""
