"""Small simulated groups for tests of one behaviour (`dps.testing.worlds`)."""

from dps.testing.worlds import HORIZON, TIMINGS, Setting, happened, in_world, until

__all__ = ["HORIZON", "TIMINGS", "Setting", "happened", "in_world", "until"]
