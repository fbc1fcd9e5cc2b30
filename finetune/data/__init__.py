"""Examples, their features, and batches of them."""
