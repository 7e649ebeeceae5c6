"""The only code that knows Dask: actors, transport, scheduler plugin, facade and worker loop."""
