"""Long checks of the promises: soak runs on real processes, and the simulator's front end."""
