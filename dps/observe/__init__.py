"""Views of a training while it runs: its history, its state and its progress."""
