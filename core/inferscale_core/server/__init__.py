"""The endpoint plugin: memory routes, prompt composition and the encode queue."""
