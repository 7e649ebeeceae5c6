"""Carries fault plans out on a real cluster, with proof that each fault happened."""
