// Products of small matrices by a warp together, on the GPU's matrix units: float16 or bfloat16 times the
// same, summed in float32.
//
// All 32 lanes call every function, with the same arguments. A matrix is spread over the lanes in a way that
// is the unit's own: elements are reached through memory only. Addresses (shared or global) must be multiples
// of 32 bytes, strides (elements between rows, or columns) of 8 elements for float16 and bfloat16, 4 for
// float32.
#pragma once

#include "launch.hpp"
#include "types.hpp"

#ifdef STREAMLLM_EMULATION
#include "emulation/wmma.hpp"
#else
#include <mma.h>
#endif

namespace streamllm::cuda {

inline constexpr int kMatrixDepth = 16;  // columns of the left matrix, rows of the right one

enum class Layout { kRows, kColumns };  // which of them lie one after the other in memory

namespace matrix_unit {
template <Layout kLayout>
using WmmaLayout =
    std::conditional_t<kLayout == Layout::kRows, nvcuda::wmma::row_major, nvcuda::wmma::col_major>;
}

// kRows x 16. (kRows, kColumns) of a product: (16, 16), (8, 32) or (32, 8).
template <typename T, int kRows, int kColumns, Layout kLayout = Layout::kRows>
class LeftMatrix {
 public:
  __device__ __forceinline__ void load(const T* address, int stride) {
    nvcuda::wmma::load_matrix_sync(fragment, address, stride);
  }

  nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, kRows, kColumns, kMatrixDepth, T,
                         matrix_unit::WmmaLayout<kLayout>>
      fragment;
};

// 16 x kColumns.
template <typename T, int kRows, int kColumns, Layout kLayout = Layout::kRows>
class RightMatrix {
 public:
  __device__ __forceinline__ void load(const T* address, int stride) {
    nvcuda::wmma::load_matrix_sync(fragment, address, stride);
  }

  nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, kRows, kColumns, kMatrixDepth, T,
                         matrix_unit::WmmaLayout<kLayout>>
      fragment;
};

// kRows x kColumns sums.
template <int kRows, int kColumns>
class Accumulator {
 public:
  __device__ __forceinline__ void fill(float value) { nvcuda::wmma::fill_fragment(fragment, value); }

  // Row by row.
  __device__ __forceinline__ void load(const float* address, int stride) {
    nvcuda::wmma::load_matrix_sync(fragment, address, stride, nvcuda::wmma::mem_row_major);
  }
  __device__ __forceinline__ void store(float* address, int stride) const {
    nvcuda::wmma::store_matrix_sync(address, fragment, stride, nvcuda::wmma::mem_row_major);
  }

  // Adds left * right.
  template <typename T, Layout kLeft, Layout kRight>
  __device__ __forceinline__ void add_product(const LeftMatrix<T, kRows, kColumns, kLeft>& left,
                                              const RightMatrix<T, kRows, kColumns, kRight>& right) {
    nvcuda::wmma::mma_sync(fragment, left.fragment, right.fragment, fragment);
  }

  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, kRows, kColumns, kMatrixDepth, float> fragment;
};

}  // namespace streamllm::cuda
