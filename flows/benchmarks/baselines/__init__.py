"""What `dps bench baselines` trains beside dps: a small module for each system, and the harness."""
