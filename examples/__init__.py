"""The problems that parameter servers are for, written as a user of the library writes them.

Unlike a workload, which is arithmetic for the experiments to train, each of these brings its data,
its server and its training function, and an independent reference for what it reaches.
"""
