// nvcuda::wmma of float16 and bfloat16 as C++: elements are spread over the 32 lanes, and each function is a
// collective of the warp.
#pragma once

#include "runtime.hpp"

namespace nvcuda::wmma {

struct row_major {};
struct col_major {};
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
enum layout_t { mem_row_major, mem_col_major };

// An element is in one lane, (row * columns + column) * 5 % 32: neighbours are in different ones.
template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
  static constexpr int kRows = std::is_same_v<Use, matrix_b> ? K : M;
  static constexpr int kColumns = std::is_same_v<Use, matrix_a> ? K : N;
  static constexpr int num_elements = kRows * kColumns / 32;
  static_assert(K == 16 && M * N == 256 && (M == 8 || M == 16 || M == 32));

  T x[num_elements];

  static int lane_of(int element) { return element * 5 % 32; }
  static int slot_of(int element) { return element / 32; }
};

namespace emulation = streamllm::emulation;

template <typename Fragment>
struct Access {
  Fragment* fragment;
  uintptr_t address;
  int stride;
  bool by_rows;
};

// All lanes must name the same matrix in memory.
template <typename Fragment>
void check_same(emulation::Lane* lanes, unsigned mask) {
  const auto* first = reinterpret_cast<const Access<Fragment>*>(lanes[0].value);
  emulation::for_each_lane(mask, [&](int lane) {
    const auto* access = reinterpret_cast<const Access<Fragment>*>(lanes[lane].value);
    if (access->address != first->address || access->stride != first->stride) {
      emulation::fault("the lanes of a warp name different matrices in memory");
    }
  });
}

template <typename Fragment, typename T>
void access_matrix(const char* name, Fragment& fragment, T* address, unsigned stride, bool by_rows,
                   emulation::Site site) {
  const auto number = reinterpret_cast<uintptr_t>(address);
  if (number % 32 != 0)
    emulation::fault("%s at %p, which is not a multiple of 32", name, (const void*)address);
  if (stride * sizeof(T) % 16 != 0) emulation::fault("%s with rows %u elements apart", name, stride);
  const Access<const Fragment> access{&fragment, number, static_cast<int>(stride), by_rows};
  emulation::synchronize_warp({name, check_same<const Fragment>}, ~0u, emulation::to_bits(&access), 0, site);
  const int lane = emulation::lane_of_thread();
  for (int element = 0; element < Fragment::kRows * Fragment::kColumns; ++element) {
    if (Fragment::lane_of(element) != lane) continue;
    const int row = element / Fragment::kColumns, column = element % Fragment::kColumns;
    T& place = by_rows ? address[row * static_cast<int>(stride) + column]
                       : address[column * static_cast<int>(stride) + row];
    if constexpr (std::is_const_v<T>) {
      fragment.x[Fragment::slot_of(element)] = place;
    } else {
      place = fragment.x[Fragment::slot_of(element)];
    }
  }
  emulation::synchronize_warp({name, nullptr}, ~0u, 0, 0, site);
}

template <typename Use, int M, int N, int K, typename T, typename Layout>
void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& to, const T* from, unsigned stride,
                      emulation::Site site = emulation::Site::here()) {
  access_matrix("load_matrix_sync", to, from, stride, std::is_same_v<Layout, row_major>, site);
}

template <int M, int N, int K>
void load_matrix_sync(fragment<accumulator, M, N, K, float>& to, const float* from, unsigned stride,
                      layout_t layout, emulation::Site site = emulation::Site::here()) {
  access_matrix("load_matrix_sync", to, from, stride, layout == mem_row_major, site);
}

template <int M, int N, int K>
void store_matrix_sync(float* to, const fragment<accumulator, M, N, K, float>& from, unsigned stride,
                       layout_t layout, emulation::Site site = emulation::Site::here()) {
  access_matrix("store_matrix_sync", from, to, stride, layout == mem_row_major, site);
}

template <typename Fragment>
void fill_fragment(Fragment& fragment, float value) {
  std::fill(fragment.x, fragment.x + Fragment::num_elements, value);
}

template <typename A, typename B, typename C>
struct Product {
  const A* a;
  const B* b;
  C* c;
};

// A whole matrix row by row, from the fragments of all lanes.
template <typename Fragment, typename FragmentOfLane>
void gather(float* matrix, FragmentOfLane&& fragment_of) {
  for (int element = 0; element < Fragment::kRows * Fragment::kColumns; ++element) {
    const Fragment& fragment = fragment_of(Fragment::lane_of(element));
    matrix[element] = static_cast<float>(fragment.x[Fragment::slot_of(element)]);
  }
}

template <typename A, typename B, typename C>
void multiply(emulation::Lane* lanes, unsigned /*mask*/) {
  const auto product = [&](int lane) { return reinterpret_cast<const Product<A, B, C>*>(lanes[lane].value); };
  float left[A::kRows * A::kColumns], right[B::kRows * B::kColumns], sums[C::kRows * C::kColumns];
  gather<A>(left, [&](int lane) -> const A& { return *product(lane)->a; });
  gather<B>(right, [&](int lane) -> const B& { return *product(lane)->b; });
  gather<C>(sums, [&](int lane) -> const C& { return *product(lane)->c; });
  emulation::add_product(sums, left, right, C::kRows, C::kColumns, A::kColumns);
  for (int element = 0; element < C::kRows * C::kColumns; ++element) {
    product(C::lane_of(element))->c->x[C::slot_of(element)] = sums[element];
  }
}

template <int M, int N, int K, typename T, typename LayoutA, typename LayoutB>
void mma_sync(fragment<accumulator, M, N, K, float>& out, const fragment<matrix_a, M, N, K, T, LayoutA>& a,
              const fragment<matrix_b, M, N, K, T, LayoutB>& b,
              const fragment<accumulator, M, N, K, float>& c,
              emulation::Site site = emulation::Site::here()) {
  using A = std::decay_t<decltype(a)>;
  using B = std::decay_t<decltype(b)>;
  using C = std::decay_t<decltype(c)>;
  if (&out != &c) out = c;
  const Product<A, B, C> product{&a, &b, &out};
  emulation::synchronize_warp({"mma_sync", multiply<A, B, C>}, ~0u, emulation::to_bits(&product), 0, site);
}

}  // namespace nvcuda::wmma
