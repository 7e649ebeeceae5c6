"""What faults did to a trial: the outages over all of them, and differences to a control."""
