"""GPU kernels in Triton: what a machine without a CUDA compiler runs, and prefill everywhere."""
