"""What `dps advise` says: what each way to recover costs a training, and which one to use."""
