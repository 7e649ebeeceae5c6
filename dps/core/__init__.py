"""Numerics and state machines: no input or output, no clock, no tasks. Imports numpy only."""
