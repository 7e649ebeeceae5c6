"""Owns what the replication of "Training Through Failure" makes of its records: claims and figures."""
