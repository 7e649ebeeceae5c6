"""How messages travel between processes: by Dask, shared memory, or a stream of dps."""
