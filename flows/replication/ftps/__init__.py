"""Judges the claims of Pampari and Patel, "Fault-Tolerant Parameter Server", by recorded trials."""
