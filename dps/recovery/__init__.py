"""Recovery: a module for each strategy, and the files of checkpoints."""
