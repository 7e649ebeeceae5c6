"""The wheel as users install it."""
