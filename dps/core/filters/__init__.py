"""Filters of gradients: selection, encoding, and the residuals of a worker."""
