"""Complete problems for a parameter server, written as user programs.

Unlike a workload of an experiment, each example has its data, its server, its training function and
an independent reference.
"""
