"""The systems of `make bench`, one in each module: dps, and other transports."""
