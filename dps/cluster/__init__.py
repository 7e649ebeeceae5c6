"""The code that runs on Dask: actors, transport, scheduler plugin, facade and worker loop."""
