"""GPU kernels in Triton: relative attention, add-norm and GELU-dropout."""
