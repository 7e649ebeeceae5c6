"""Long runs of real processes under random faults, with every promise checked: `make soak`."""
