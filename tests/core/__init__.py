"""Tests of the numerics and state machines."""
