"""The step loop on a CUDA device: state that stays there, kernels of our own, graphs."""
