"""The CUDA kernels of ``csrc/cuda``, called through ctypes."""
