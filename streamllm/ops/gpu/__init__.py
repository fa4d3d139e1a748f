"""Operations on a GPU: torch tensors, and kernels from CUDA C++ or Triton behind one interface."""
