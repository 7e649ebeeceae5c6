"""The systems that are trained beside dps, each in a module, and what runs and compares them."""
