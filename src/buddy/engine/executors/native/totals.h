/* The sum of a register's elements, of four registers at once. */

#ifndef BUDDY_TOTALS_H
#define BUDDY_TOTALS_H

#include "matrix.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef int32_t Four __attribute__((vector_size(16)));
typedef float FourFloats __attribute__((vector_size(16)));

/* Four registers turned over in each quarter: element i of every quarter of one after another. */
static inline __attribute__((always_inline)) void turn_quarters(Ints *x)
{
#if defined(__AVX512F__)
#define TURN(how, a, b) (Ints)_mm512_unpack##how((__m512i)(a), (__m512i)(b))
#elif defined(__AVX2__)
#define TURN(how, a, b) (Ints)_mm256_unpack##how((__m256i)(a), (__m256i)(b))
#endif
#if defined(__AVX2__)
    Ints a = TURN(lo_epi32, x[0], x[1]), b = TURN(hi_epi32, x[0], x[1]);
    Ints c = TURN(lo_epi32, x[2], x[3]), d = TURN(hi_epi32, x[2], x[3]);
    x[0] = TURN(lo_epi64, a, c), x[1] = TURN(hi_epi64, a, c);
    x[2] = TURN(lo_epi64, b, d), x[3] = TURN(hi_epi64, b, d);
#undef TURN
#elif defined(__aarch64__)
    int32x4x2_t a = vtrnq_s32((int32x4_t)x[0], (int32x4_t)x[1]);
    int32x4x2_t b = vtrnq_s32((int32x4_t)x[2], (int32x4_t)x[3]);
    for (int i = 0; i < 2; i++) {
        x[i] = (Ints)vcombine_s32(vget_low_s32(a.val[i]), vget_low_s32(b.val[i]));
        x[2 + i] = (Ints)vcombine_s32(vget_high_s32(a.val[i]), vget_high_s32(b.val[i]));
    }
#else
    Ints was[4] = {x[0], x[1], x[2], x[3]};
    for (int i = 0; i < 4; i++)
        x[i] = (Ints){was[0][i], was[1][i], was[2][i], was[3][i]};
#endif
}

/* Sums of all elements of each of four registers. */
static inline __attribute__((always_inline)) Four totals_of_ints(Ints *x)
{
    turn_quarters(x);
    Ints sum = (x[0] + x[1]) + (x[2] + x[3]);
#if defined(__AVX512F__)
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256((__m512i)sum),
                                    _mm512_extracti64x4_epi64((__m512i)sum, 1));
#elif defined(__AVX2__)
    __m256i half = (__m256i)sum;
#else
    return sum;
#endif
#if defined(__AVX2__)
    return (Four)_mm256_castsi256_si128(half) + (Four)_mm256_extracti128_si256(half, 1);
#endif
}

/* The same of floats, all in one order. */
static inline __attribute__((always_inline)) FourFloats totals_of_floats(const Floats *sums)
{
    Ints x[4] = {(Ints)sums[0], (Ints)sums[1], (Ints)sums[2], (Ints)sums[3]};
    turn_quarters(x);
    Floats even = (Floats)x[0] + (Floats)x[2], odd = (Floats)x[1] + (Floats)x[3];
    AS_IT_IS(even);
    AS_IT_IS(odd);
    Floats sum = even + odd;
    AS_IT_IS(sum);
#if defined(__AVX512F__)
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)sum),
                                _mm512_extractf32x8_ps((__m512)sum, 1));
    AS_IT_IS(half);
#elif defined(__AVX2__)
    __m256 half = (__m256)sum;
#else
    return sum;
#endif
#if defined(__AVX2__)
    return (FourFloats)_mm256_castps256_ps128(half) + (FourFloats)_mm256_extractf128_ps(half, 1);
#endif
}
#endif
