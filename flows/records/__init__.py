"""The run folder on disk: event files, owner locks, logs, and the settings of trials."""
