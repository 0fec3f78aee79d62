"""Durable facts, their embeddings and the index over them."""
