"""The InferScale core: facts, encoding, KV injection and the service around them."""
