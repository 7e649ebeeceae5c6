"""The systems that are compared with dps, one in each module, and the comparison."""
