"""Progress of runs in flight, and how long they will still take."""
