"""``make gpu-check``: the kernels on a CUDA device, measured and compared with their reference."""
