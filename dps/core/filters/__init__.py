"""Filters of gradients: what a worker withholds, how the rest travels, what is kept for later."""
