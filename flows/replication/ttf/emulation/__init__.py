"""A small emulation of "Training Through Failure" as it was published, mechanics and flaws.

It is deliberately not the protocol of dps: what it measures is what its authors measured, with
real processes, real SIGKILL, and the same kind of record. `dps replicate ttf` sets it beside dps.
"""
