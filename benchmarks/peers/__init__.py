"""What `make bench` measures, a module each: dps itself, and what else could carry it."""
