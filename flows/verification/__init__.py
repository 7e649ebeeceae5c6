"""The front end of the simulator, and virtual time compared with real time."""
