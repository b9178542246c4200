/* Rows of 4 bits times vectors in bytes, where no instruction has dot products of these.
 *
 * Each group of a vector is rounded for itself: its largest number becomes 127 of its units, so an element
 * moves by at most a 254th of the group's largest. Weights of 4 bits are rounded a sixteenth as finely.
 * Products of bytes are added up in 16 bits, which hold a group's, and scaled once for a group.
 */

#ifndef BUDDY_NIBBLES_H
#define BUDDY_NIBBLES_H

#include "groups.h"
#include "rounding.h"
#include "totals.h"

#if !HAS_BYTE_DOT
#define SHORTS (2 * WIDTH)
typedef int16_t Shorts __attribute__((vector_size(2 * SHORTS)));
#define LARGEST_BYTE 127
#define STEP_BYTES (3 * DEEP_BYTES) /* that GROUPS groups of a vector take */

/* WIDTH sums of two products each, all of one quarter. */
static inline Ints pair_sums(Shorts a, Shorts b)
{
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__aarch64__)
    int16x8_t left = (int16x8_t)a, right = (int16x8_t)b;
    int32x4_t low = vmull_s16(vget_low_s16(left), vget_low_s16(right));
    return (Ints)vmlal_high_s16(low, left, right);
#else
    Ints sums;
    for (int i = 0; i < WIDTH; i++)
        sums[i] = a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return sums;
#endif
}

/* SHORTS sums of two products each of numbers from 0 to 15 and bytes, all of one quarter. */
static inline Shorts byte_pair_sums(Bytes numbers, Bytes x)
{
#if defined(__AVX512BW__)
    return (Shorts)_mm512_maddubs_epi16((__m512i)numbers, (__m512i)x);
#elif defined(__AVX2__)
    return (Shorts)_mm256_maddubs_epi16((__m256i)numbers, (__m256i)x);
#elif defined(__aarch64__)
    int8x16_t left = (int8x16_t)numbers, right = (int8x16_t)x;
    int16x8_t low = vmull_s8(vget_low_s8(left), vget_low_s8(right));
    return (Shorts)vmlal_high_s8(low, left, right);
#else
    Shorts sums;
    for (int i = 0; i < SHORTS; i++)
        sums[i] = numbers[2 * i] * x[2 * i] + numbers[2 * i + 1] * x[2 * i + 1];
    return sums;
#endif
}

/* WIDTH sums of two. */
static inline Ints sums_of_pairs(Shorts x)
{
#if defined(__aarch64__)
    return (Ints)vpaddlq_s16((int16x8_t)x);
#else
    return pair_sums(x, (Shorts){0} + 1);
#endif
}

/* One of N vectors, four at most, as rows of 4 bits meet them: of GROUPS groups at a time, and of these one
 * vector after another, the bytes of their first halves, of their second halves, and WIDTH floats that say
 * what one is worth; behind the last group are zeros. `starts` gets what minimums are multiplied with. */
static __attribute__((noinline)) void round_groups(
    const float *x, int columns, int format, int N, char *out, float *starts)
{
    int groups = columns / GROUP, group = 0;
    for (char *step = out; group < groups; step += N * STEP_BYTES) {
        int8_t *halves = (int8_t *)step;
        float *units = (float *)(step + 2 * DEEP_BYTES);
        if (group + GROUPS > groups)
            memset(step, 0, STEP_BYTES);
        for (int i = 0; i < GROUPS && group < groups; i++, group++, halves += GROUP / 2, units += 4) {
            int16_t numbers[GROUP];
            float unit = round_to(x + group * GROUP, GROUP, LARGEST_BYTE, numbers);
            for (int at = 0; at < GROUP / 2; at++)
                halves[at] = (int8_t)numbers[at];
            for (int at = 0; at < GROUP / 2; at++)
                halves[DEEP_BYTES + at] = (int8_t)numbers[GROUP / 2 + at];
            units[0] = units[1] = units[2] = units[3] = unit;
            sum_groups(numbers, GROUP, format, starts + group);
            starts[group] *= unit;
        }
    }
}

/* GROUPS groups, of which some may be left, of R rows times N vectors. */
static inline __attribute__((always_inline)) void add_groups(
    const Matrix *matrix, int format, int row, size_t group, size_t left, int R, const char *step, int N,
    Floats *sums)
{
    Bytes first[4], second[4];
    Floats scale[4];
    unpack_groups(matrix, format, row, group, left, R, first, second, scale);
    for (int n = 0; n < N; n++, step += STEP_BYTES)
        for (int r = 0; r < R; r++) {
            Shorts sum = byte_pair_sums(first[r], bytes_at(step));
            sum += byte_pair_sums(second[r], bytes_at(step + DEEP_BYTES));
            Floats worth = scale[r] * (Floats)bytes_at(step + 2 * DEEP_BYTES);
            AS_IT_IS(worth);
            sums[n * R + r] += __builtin_convertvector(sums_of_pairs(sum), Floats) * worth;
        }
}

/* Groups of R rows times N vectors that share units of scales, by which whole numbers are multiplied first. */
static inline __attribute__((always_inline)) void add_super(
    const Matrix *matrix, int row, size_t group, int R, const char *step, int N, Floats *sums)
{
    size_t groups = (size_t)matrix->columns / GROUP, at = row * groups + group;
    Floats parts[MOST_SUMS];
    for (int i = 0; i < R * N; i++)
        parts[i] = (Floats){0};
#pragma GCC unroll 8
    for (int g = 0; g < SUPER; g += GROUPS) {
        Bytes first[4], second[4];
        Shorts scale[4];
        unpack_numbers(matrix, row, group + g, GROUPS, R, first, second);
        for (int r = 0; r < R; r++)
            scale[r] = (Shorts)byte_scales_at((const uint8_t *)matrix->scales + at + r * groups, g, 16);
        for (int n = 0; n < N; n++, step += STEP_BYTES)
            for (int r = 0; r < R; r++) {
                Shorts sum = byte_pair_sums(first[r], bytes_at(step));
                sum += byte_pair_sums(second[r], bytes_at(step + DEEP_BYTES));
                parts[n * R + r] += __builtin_convertvector(pair_sums(sum, scale[r]), Floats)
                    * (Floats)bytes_at(step + 2 * DEEP_BYTES);
                AS_IT_IS(parts[n * R + r]);
            }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++)
            sums[n * R + r] += parts[n * R + r] * matrix->units[(at + r * groups) / SUPER * 2];
}

/* R rows of 4 bits times N vectors of round_groups. */
static inline __attribute__((always_inline)) void block_int4(
    const Matrix *matrix, int format, int R, const char *x, const float *starts, int N,
    float *const *y, int row)
{
    Floats sums[MOST_SUMS];
    size_t groups = (size_t)matrix->columns / GROUP, group = 0;
    const char *ahead = (const char *)matrix->weights + row * groups * (GROUP / 2) + BYTES_AHEAD;
    ask_for_groups(matrix, format, R, row);
    for (int i = 0; i < (R * N + 3) / 4 * 4; i++)
        sums[i] = (Floats){0};
    for (size_t at = 0; at < groups; at += WIDTH)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            Floats minimum = minimums_at(matrix, format, (row + r) * groups + at, groups - at);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
                sums[n * R + r] += minimum * floats_at(starts + n * groups + at, groups - at);
        }
    for (; format == INT4_BYTES && group < groups; group += SUPER, x += SUPER / GROUPS * N * STEP_BYTES) {
        for (int at = 0; at < R * SUPER * GROUP / 2; at += 64, ahead += 64)
            __builtin_prefetch(ahead);
        add_super(matrix, row, group, R, x, N, sums);
    }
    for (; group + GROUPS <= groups; group += GROUPS, ahead += R * DEEP_BYTES, x += N * STEP_BYTES) {
        for (int at = 0; at < R * DEEP_BYTES; at += 64)
            __builtin_prefetch(ahead + at);
        add_groups(matrix, format, row, group, GROUPS, R, x, N, sums);
    }
    if (group < groups)
        add_groups(matrix, format, row, group, groups - group, R, x, N, sums);
    for (int i = 0; i < R * N; i += 4) {
        FourFloats four = totals_of_floats(sums + i);
        for (int j = i; j < i + 4 && j < R * N; j++)
            y[j / R][row + j % R] = four[j - i];
    }
}
#endif

#endif
