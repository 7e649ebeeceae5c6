"""Sparse tables: their description, rows by key, gradients of rows, and which shard has a key."""
