"""Where nodes come from: local processes, an existing deployment, jobs of a queueing system."""
