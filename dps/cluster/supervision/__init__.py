"""Automatic return: a program whose driver or scheduler is lost is started again by itself."""
