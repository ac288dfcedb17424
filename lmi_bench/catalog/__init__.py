"""Accelerators, instances with dated prices, models and published measurements."""
