"""A package of another maker, with a kind for each group of entry points that dps looks into."""
