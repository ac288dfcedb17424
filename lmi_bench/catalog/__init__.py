"""Catalog of accelerators, instances with dated prices, models and published measurements."""
