"""The part on a node: actors, the worker loop, recorders, metrics, orderly shutdown."""
