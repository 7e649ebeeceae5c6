"""Experiments of published papers, repeated: their claims, measures and verdicts."""
