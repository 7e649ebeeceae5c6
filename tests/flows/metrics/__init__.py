"""Tests of the figures that are told of a trial."""
