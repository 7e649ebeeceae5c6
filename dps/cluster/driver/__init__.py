"""The part in the driver: the parameter server as a user sees it, and the hosts behind it."""
