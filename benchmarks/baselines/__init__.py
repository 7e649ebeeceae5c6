"""The systems that `make bench-baselines` trains beside dps, a module each, and the harness."""
