"""How messages get from one process to another: over Dask, shared memory, or a stream of dps's."""
