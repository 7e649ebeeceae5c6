"""The experiment platform on top of `dps`: configuration, grids of trials, workloads, tracking,
statistics, reports and the `dps` command. It imports `dps`; `dps` never imports it.
"""
