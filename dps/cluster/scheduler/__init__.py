"""The part in Dask's scheduler process: the plugin of the coordinator."""
