"""Scheduler and block manager in pure Python: decide each step, never run it."""
