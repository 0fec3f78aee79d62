"""Rotate-and-scatter kernels and their PyTorch reference."""
