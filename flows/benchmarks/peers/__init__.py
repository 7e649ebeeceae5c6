"""What `dps bench transport` measures, a module each: dps itself, and what else could carry it."""
