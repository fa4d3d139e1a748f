// Integer dot products of 16 columns with one row, four elements of k at a time.
//
// `Quads` are 64 bytes: [16 columns][4 consecutive elements]. Of a group of 32 elements, a dot product takes
// eight quads, one with first() and then the others with add(), and its total is exact. `group` (the row's
// activations) is the same in first() and in total(): where an instruction set multiplies unsigned bytes, the
// correction that it holds for the weights' offset goes in at either end.
//
// NibbleDot<OFFSET>: weights u - OFFSET, u of 4 bits, OFFSET 0 or 8.
// ByteDot: weights of 8 bits, signed; weight() does once for all rows what a product needs of them.
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
