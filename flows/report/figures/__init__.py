"""The figures of an experiment, drawn from its records; `gallery` says which there are."""
