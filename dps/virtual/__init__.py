"""Virtual time: what `dps.cluster` uses of Dask, in one process, where only the clock waits."""
