"""Rotary tables, the arena and the layout of the paged cache."""
