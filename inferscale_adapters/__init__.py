"""Adapters that point memory frameworks at an InferScale core."""
