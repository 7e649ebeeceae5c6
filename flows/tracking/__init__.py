"""MLflow: its store, the tracker that writes to it, delivery after outages, and its UI server."""
