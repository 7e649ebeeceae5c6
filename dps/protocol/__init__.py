"""The distributed algorithms, written once as async code against `Transport` and `Clock`."""
