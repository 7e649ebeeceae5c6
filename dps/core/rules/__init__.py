"""Update rules: how a shard's weights take a gradient, and what they need for it."""
