"""What the library shows of a training while it runs: its history, views of it, its progress."""
