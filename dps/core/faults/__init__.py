"""Fault plans as data, and how recurring faults become single ones."""
