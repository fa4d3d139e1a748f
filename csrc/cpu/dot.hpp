// Integer dot products of 16 columns with one row, four elements of k at a time.
//
// `Quads` are 64 bytes: [16 columns][4 consecutive elements]. Of the elements that share a scale, a dot
// product takes the quads in order, the one with first() and the others with add(u, x, index), and its total
// is exact.
//
// UnsignedDot<BITS, OFFSET>: weights u - OFFSET, u of BITS bits; of 32 elements, of 6 bits 16.
// ByteDot: 32 weights of 8 bits, signed; weight() does once for all rows what a product needs of them.
//
// Both may add up unsigned weights, less kOffset when they stand for what they are, and take -kOffset *
// sum(activations) as `correction`, the same in first() and in total(): it goes in at either end.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

#if defined(STREAMLLM_SIMD_AVX512)
#include "dot_avx512.hpp"
#elif defined(STREAMLLM_SIMD_AVX2)
#include "dot_avx2.hpp"
#else
#include "dot_portable.hpp"
#endif
