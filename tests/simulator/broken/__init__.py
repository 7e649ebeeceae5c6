"""Deliberately broken variants of the protocol, and the hunt that must catch every one."""
