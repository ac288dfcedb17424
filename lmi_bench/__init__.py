"""Benchmark LLM endpoints and plan their capacity."""

__version__ = "0.1.0"
