"""What runs on a node: actors, the worker loop, transport, recorders, metrics, orderly shutdown."""
