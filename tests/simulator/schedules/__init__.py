"""Schedules of faults: strategies, what is drawn from a seed, and how a schedule is shrunk."""
