"""The protocol on virtual time: one process, one seed, any fault; it runs what runs on Dask."""
