"""What runs in Dask's scheduler process: the coordinator's plugin and reservations of nodes."""
