"""Automatic return."""
