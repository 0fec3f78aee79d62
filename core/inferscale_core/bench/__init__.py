"""Benchmarks and the demo."""

DEFAULT_MODEL = "smollm2-135m"
"""What everything here runs on unless told otherwise; see ``inferscale models list``."""
