/* A vector in whole numbers of two bytes, as rows of fewer bits meet it.
 *
 * Its largest number becomes 32,639 of its units, so an element moves by at most 2^-16 of the largest. A
 * whole number is 256 times a high byte plus a low one, both from -128 to 127, and weights meet each of
 * them. x86 multiplies signed bytes with unsigned ones only: weights of 8 bits are read BIAS too large, and
 * sums begin at what that is worth, taken away.
 */

#ifndef BUDDY_BYTE_VECTORS_H
#define BUDDY_BYTE_VECTORS_H

#include "groups.h"
#include "rounding.h"
#include "totals.h"

#if HAS_BYTE_DOT
#if defined(__aarch64__)
#include <arm_neon.h>
#define BIAS 0
#else
#define BIAS 128
#endif
#define LARGEST 32639
#define MOST_COLUMNS 131071 /* whose products' sum an int holds: 128 times 128 each */

/* Add WIDTH sums of four products. */
static inline Ints add_dots(Ints sums, Bytes weights, Bytes x)
{
#if defined(__AVX512F__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
#elif defined(__AVX2__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)x);
#else
    return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, (int8x16_t)x);
#endif
}

/* A vector as rows meet it, in registers one after another. INT8: high bytes and low ones of DEEP_BYTES
 * columns. INT8_GROUPS: the same, and Ints that sums with both begin at. 4 bits: high bytes of the first
 * halves of GROUPS groups, of the second halves, low bytes of both. */
typedef struct {
    const char *bytes;
    const char *starts; /* INT8: of sums with high bytes, and with low ones, Ints each. 4 bits: floats,
                           of sum_groups */
    float unit;         /* what one whole number is worth */
} Whole;

static size_t steps_of_bytes(int columns, int format)
{
    size_t step = is_int4(format) ? GROUPS * GROUP : DEEP_BYTES;
    return ((size_t)columns + step - 1) / step;
}

/* Floats that a vector takes. */
static size_t vector_floats(int columns)
{
    return (6 * steps_of_bytes(columns, INT4) + 2) * WIDTH;
}

/* High bytes and low ones of `count` whole numbers. */
static inline void part(const int16_t *restrict numbers, int count, int8_t *high, int8_t *low)
{
    for (int i = 0; i < count; i++) {
        int16_t upper = (int16_t)((numbers[i] + 128) >> 8);
        high[i] = (int8_t)upper;
        low[i] = (int8_t)(numbers[i] - upper * 256);
    }
}

/* `numbers` has room for whole steps, `out` for vector_floats. */
static __attribute__((noinline)) Whole part_vector(
    const float *x, int columns, int format, int16_t *numbers, float *out)
{
    size_t steps = steps_of_bytes(columns, format), registers = steps * (is_int4(format) ? 4 : 2);
    float unit = round_vector(x, columns, LARGEST, numbers);
    memset(numbers + columns, 0, sizeof *numbers * (registers * DEEP_BYTES / 2 - columns));
    int8_t *to = (int8_t *)out;
    Whole made = {(const char *)out, (const char *)out + registers * DEEP_BYTES, unit};
    if (is_int4(format)) {
        sum_groups(numbers, columns, format, out + registers * WIDTH);
        for (int group = 0; group * GROUP < columns; group++, numbers += GROUP) {
            for (int half = 0; half < 2; half++)
                part(numbers + half * (GROUP / 2), GROUP / 2, to + half * DEEP_BYTES,
                     to + (2 + half) * DEEP_BYTES);
            to += (group + 1) % GROUPS ? GROUP / 2 : 4 * DEEP_BYTES - (GROUPS - 1) * (GROUP / 2);
        }
        return made;
    }
    Ints starts[2] = {{0}, {0}};
    for (size_t step = 0; step < steps; step++, numbers += DEEP_BYTES, to += 2 * DEEP_BYTES) {
        part(numbers, DEEP_BYTES, to, to + DEEP_BYTES);
        for (int half = 0; half < 2; half++)
            starts[half] -= add_dots((Ints){0}, (Bytes){0} + (int8_t)BIAS,
                                     bytes_at(to + half * DEEP_BYTES));
        if (format == INT8_GROUPS) {
            Ints start = (starts[0] << 8) + starts[1];
            memcpy(to + 2 * DEEP_BYTES, &start, sizeof start);
            starts[0] = starts[1] = (Ints){0};
            to += DEEP_BYTES;
        }
    }
    if (format == INT8)
        memcpy(to, starts, sizeof starts);
    return made;
}
#endif

#endif
