/* Scales and minimums of groups of 4 bits, as products of whole numbers read them.
 *
 * A weight is its group's scale times a number from 0 to 15, plus the group's minimum, which in INT4 is -8
 * times the scale. So a product is that of the numbers, and of each group the minimum times the sum of the
 * vector there, which is made once for all rows. Sums begin with the latter.
 */

#ifndef BUDDY_GROUPS_H
#define BUDDY_GROUPS_H

#include "matrix.h"

#define DEEP_BYTES (4 * WIDTH) /* that a register holds */
#define GROUPS (WIDTH / 4) /* of 4 bits, which a register holds, each in its quarter */

typedef int8_t Bytes __attribute__((vector_size(DEEP_BYTES)));

static inline Bytes bytes_at(const void *from)
{
    Bytes here;
    memcpy(&here, from, sizeof here);
    return here;
}

/* What is left of WIDTH floats, and zeros. */
static inline __attribute__((always_inline)) Floats floats_at(const float *from, size_t left)
{
#if defined(__AVX512F__)
    return (Floats)_mm512_maskz_loadu_ps(left >= WIDTH ? 0xffff : (__mmask16)((1u << left) - 1), from);
#elif defined(__AVX2__)
    const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i is_there = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)left), places);
    return (Floats)_mm256_maskload_ps(from, is_there);
#else
    Floats here = {0};
    for (size_t i = 0; i < left && i < WIDTH; i++)
        here[i] = from[i];
    return here;
#endif
}

#if defined(__AVX2__)
/* Minimums in bytes, of one unit or, where more than SUPER are left, two. */
static inline __attribute__((always_inline)) Floats of_units(Ints bytes, const float *units, size_t left)
{
#if defined(__AVX512F__)
    const __m512i order = _mm512_setr_epi32(1, 1, 1, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3);
    __m128 both = _mm_maskz_loadu_ps(left > SUPER ? 10 : 2, units);
    Floats unit = (Floats)_mm512_permutexvar_ps(order, _mm512_castps128_ps512(both));
#else
    (void)left;
    Floats unit = (Floats){0} + units[MINIMUM];
#endif
    Floats worth = __builtin_convertvector(bytes, Floats) * unit;
    AS_IT_IS(worth);
    return worth;
}
#endif

/* What is left of WIDTH minimums, from a group on, and zeros. */
static inline __attribute__((always_inline)) Floats minimums_at(
    const Matrix *matrix, int format, size_t group, size_t left)
{
    if (format == INT4)
        return floats_at(matrix->scales + group, left);
#if defined(__AVX512BW__)
    __mmask16 mask = left >= WIDTH ? 0xffff : (__mmask16)((1u << left) - 1);
    if (format == INT4_BYTES) {
        __m128i bytes = _mm_maskz_loadu_epi8(mask, (const uint8_t *)matrix->minimums + group);
        return of_units((Ints)_mm512_cvtepu8_epi32(bytes), matrix->units + group / SUPER * 2, left);
    }
    const uint16_t *halves = (const uint16_t *)matrix->minimums + group;
    return (Floats)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, halves));
#else
#if defined(__F16C__)
    if (format == INT4_BYTES) {
        __m128i bytes = _mm_loadl_epi64((const void *)((const uint8_t *)matrix->minimums + group));
        return of_units((Ints)_mm256_cvtepu8_epi32(bytes), matrix->units + group / SUPER * 2, left);
    }
    const uint16_t *halves = (const uint16_t *)matrix->minimums + group;
    if (left >= WIDTH)
        return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const void *)halves));
    if (group + left >= WIDTH) { /* those before are there to be read */
        static const int8_t order[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                         -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
        __m128i last = _mm_loadu_si128((const void *)(halves + left - WIDTH));
        __m128i turn = _mm_loadu_si128((const void *)(order + 2 * (WIDTH - left)));
        return (Floats)_mm256_cvtph_ps(_mm_shuffle_epi8(last, turn));
    }
#endif
    Floats here = {0};
    for (size_t i = 0; i < left && i < WIDTH; i++)
        here[i] = group_float(matrix, format, MINIMUM, group + i);
    return here;
#endif
}

/* What is left of GROUPS groups of 4 bits and of their scales, each in its quarter; zeros behind them. */
static inline __attribute__((always_inline)) Bytes groups_at(const uint8_t *pairs, size_t left)
{
#if defined(__AVX512F__)
    __mmask8 mask = left >= GROUPS ? 0xff : (__mmask8)((1u << 2 * left) - 1);
    return (Bytes)_mm512_maskz_loadu_epi64(mask, pairs);
#elif defined(__AVX2__)
    __m128i first = _mm_loadu_si128((const void *)pairs), none = _mm_setzero_si128();
    return (Bytes)(left >= GROUPS ? _mm256_loadu_si256((const void *)pairs)
                                  : _mm256_set_m128i(none, first));
#else
    (void)left;
    return bytes_at(pairs);
#endif
}

/* Scales in bytes of the groups from one on that a register holds, of the SUPER that share units: each on the
 * 32 bits, or 16 bits, of its quarter. */
static inline __attribute__((always_inline)) Ints byte_scales_at(const uint8_t *scales, int group, int bits)
{
#if defined(__AVX2__)
#if defined(__AVX512BW__)
    const Ints quarter = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
#else
    const Ints quarter = {0, 0, 0, 0, 1, 1, 1, 1};
#endif
    const Ints from = quarter + group; /* and a byte of more than 127 makes a zero */
    const Ints order = bits == 32 ? from - 0x7f7f8000 : from * 0x10001 - 0x7fff8000;
    int64_t eight;
    memcpy(&eight, scales, sizeof eight);
#if defined(__AVX512BW__)
    return (Ints)_mm512_shuffle_epi8(_mm512_set1_epi64(eight), (__m512i)order);
#else
    return (Ints)_mm256_shuffle_epi8(_mm256_set1_epi64x(eight), (__m256i)order);
#endif
#else
    return (Ints){0} + scales[group] * (bits == 32 ? 1 : 0x10001);
#endif
}

static inline __attribute__((always_inline)) Floats scales_at(
    const Matrix *matrix, int format, size_t group, size_t left)
{
#if defined(__AVX512F__)
    const __m512i order = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    __mmask8 mask = left >= GROUPS ? 15 : (__mmask8)((1u << left) - 1);
    __m128 four = format == INT4_HALVES
        ? _mm_cvtph_ps(_mm_maskz_loadu_epi16(mask, (const uint16_t *)matrix->scales + group))
        : _mm_maskz_loadu_ps(mask, matrix->scales + group);
    return (Floats)_mm512_permutexvar_ps(order, _mm512_castps128_ps512(four));
#elif defined(__AVX2__)
    if (format == INT4_HALVES) {
        const __m128i order = _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3);
        uint32_t halves = 0;
        memcpy(&halves, (const uint16_t *)matrix->scales + group, left >= GROUPS ? 4 : 2);
        return (Floats)_mm256_cvtph_ps(_mm_shuffle_epi8(_mm_cvtsi32_si128((int)halves), order));
    }
    if (left < GROUPS)
        return (Floats)_mm256_set_m128(_mm_setzero_ps(), _mm_broadcast_ss(matrix->scales + group));
    double both;
    memcpy(&both, matrix->scales + group, sizeof both);
    return (Floats)_mm256_permutevar_ps(_mm256_castpd_ps(_mm256_set1_pd(both)),
                                        _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
#else
    (void)left;
    return (Floats){0} + group_float(matrix, format, SCALE, group);
#endif
}

/* Numbers from 0 to 15 of GROUPS groups of R rows, of which some may be left: those of first halves and of
 * second halves, each group in its quarter. */
static inline __attribute__((always_inline)) void unpack_numbers(
    const Matrix *matrix, int row, size_t group, size_t left, int R, Bytes *first, Bytes *second)
{
    typedef uint16_t Wide __attribute__((vector_size(DEEP_BYTES)));
    size_t groups = (size_t)matrix->columns / GROUP, at = row * groups + group;
    for (int r = 0; r < R; r++, at += groups) {
        Bytes both = groups_at((const uint8_t *)matrix->weights + at * (GROUP / 2), left);
        first[r] = both & 15;
        second[r] = (Bytes)((Wide)both >> 4) & 15;
    }
}

/* The same, and the groups' scales. */
static inline __attribute__((always_inline)) void unpack_groups(
    const Matrix *matrix, int format, int row, size_t group, size_t left, int R, Bytes *first,
    Bytes *second, Floats *scale)
{
    size_t groups = (size_t)matrix->columns / GROUP;
    unpack_numbers(matrix, row, group, left, R, first, second);
    for (int r = 0; r < R; r++)
        scale[r] = scales_at(matrix, format, (row + r) * groups + group, left);
}

/* What minimums are multiplied with: the sums of a vector's whole numbers in each group. */
static inline void sum_groups(
    const int16_t *restrict numbers, int columns, int format, float *restrict sums)
{
    for (int group = 0; group * GROUP < columns; group++) {
        int32_t sum = 0;
        for (int i = 0; i < GROUP; i++)
            sum += numbers[group * GROUP + i];
        sums[group] = (float)(format == INT4 ? -ZERO * sum : sum);
    }
}

/* Ask for what rows have at the pace of R rows from one on. */
static inline __attribute__((always_inline)) void ask_for_groups(
    const Matrix *matrix, int format, int R, int row)
{
    size_t groups = (size_t)matrix->columns / GROUP, each = format == INT4_BYTES ? 1 : format == INT4_HALVES ? 2 : 4;
    size_t begin = (row * groups + BYTES_AHEAD / 16) * each;
    for (size_t at = 0; at < R * groups * each; at += 64) {
        __builtin_prefetch((const char *)matrix->scales + begin + at);
        if (format > INT8_GROUPS)
            __builtin_prefetch((const char *)matrix->minimums + begin + at);
        if (format == INT4_BYTES)
            __builtin_prefetch((const char *)matrix->units + begin + at);
    }
}

#endif
