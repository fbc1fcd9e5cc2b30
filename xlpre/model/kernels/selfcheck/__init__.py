"""Self-check of the GPU kernels before `model.attention_backend=auto` uses them."""
