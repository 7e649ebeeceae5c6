"""Automatic return: a program whose driver or scheduler is lost is restarted by its supervisor."""
