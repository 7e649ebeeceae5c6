"""The coordinator: who is alive, which hosts serve which shards, and what failures cost."""
