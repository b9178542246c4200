/* Rows of INT8 or INT4 times vectors in whole numbers, by dot products of bytes.
 *
 * A vector's largest number becomes 32,639 of its units, so an element moves by at most 2^-16 of the
 * largest. A whole number is 256 times a high byte plus a low one, both from -128 to 127, and weights
 * meet each of them. Sums of INT8 are exact for a whole row, those of INT4 for a group. x86 multiplies
 * signed bytes with unsigned ones only: weights are read BIAS or GROUP_BIAS too large, and sums begin at
 * what that is worth, taken away.
 */

#ifndef BUDDY_BYTES_H
#define BUDDY_BYTES_H

#include "rounding.h"
#include "totals.h"

#if HAS_BYTE_DOT
#if defined(__aarch64__)
#include <arm_neon.h>
#define BIAS 0
#else
#define BIAS 128
#endif
#define GROUP_BIAS 8
#define LARGEST 32639
#define MOST_COLUMNS 131071 /* whose products' sum an int holds: 128 times 128 each */
#define DEEP_BYTES (4 * WIDTH) /* that a register holds */
#define GROUPS (WIDTH / 4) /* of INT4, whose first or second halves a register holds */

/* Vectors that meet rows at once, and how many rows then: as many as there are registers for sums. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define TOGETHER 3
#define ROWS_OF(vectors) 4
#else
#define TOGETHER 2
#define ROWS_OF(vectors) (4 / (vectors))
#endif

#define ROWS_NEAR 16 /* which stay in the nearest cache while many vectors pass */
#define ROUNDED_VECTORS 48 /* at once: a multiple of TOGETHER */

typedef int8_t Bytes __attribute__((vector_size(DEEP_BYTES)));

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

static inline Bytes bytes_at(const void *from)
{
    Bytes here;
    memcpy(&here, from, sizeof here);
    return here;
}

/* A vector as rows of INT8 or of INT4 meet it, in registers one after another. INT8: high bytes and low
 * ones of DEEP_BYTES columns. INT4: high bytes of the first halves of GROUPS groups, of the second
 * halves, low bytes of both. */
typedef struct {
    const char *bytes;
    const char *starts; /* INT8: of sums with high bytes, and with low ones, Ints each. INT4: [groups],
                           floats that a group's scale is multiplied with */
    float unit;         /* what one whole number is worth */
} Whole;

static size_t steps_of_bytes(int columns, int format)
{
    size_t step = format == INT8 ? DEEP_BYTES : GROUPS * GROUP;
    return ((size_t)columns + step - 1) / step;
}

/* Floats that a vector takes. */
static size_t vector_floats(int columns)
{
    return (5 * steps_of_bytes(columns, INT4) + 2) * WIDTH;
}

static size_t whole_floats(int columns)
{
    return ROUNDED_VECTORS * vector_floats(columns) + steps_of_bytes(columns, INT4) * GROUPS * GROUP / 2;
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
    size_t steps = steps_of_bytes(columns, format), registers = steps * (format == INT8 ? 2 : 4);
    float unit = round_vector(x, columns, LARGEST, numbers);
    memset(numbers + columns, 0, sizeof *numbers * (registers * DEEP_BYTES / 2 - columns));
    int8_t *to = (int8_t *)out;
    Whole made = {(const char *)out, (const char *)out + registers * DEEP_BYTES, unit};
    if (format == INT4) {
        float *starts = out + registers * WIDTH;
        for (int group = 0; group * GROUP < columns; group++, numbers += GROUP) {
            int32_t sum = 0;
            for (int half = 0; half < 2; half++)
                part(numbers + half * (GROUP / 2), GROUP / 2, to + half * DEEP_BYTES,
                     to + (2 + half) * DEEP_BYTES);
            for (int i = 0; i < GROUP; i++)
                sum += numbers[i];
            starts[group] = (float)(-GROUP_BIAS * sum);
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
    }
    memcpy(to, starts, sizeof starts);
    return made;
}

/* Up to four rows' sums of a vector, scaled, to their place. */
static inline __attribute__((always_inline)) void place_rows(
    FourFloats sums, const float *scales, float unit, int R, float *y)
{
    if (scales != NULL) {
        FourFloats scale = {0};
        memcpy(&scale, scales, R * sizeof *scales);
        sums *= scale;
        AS_IT_IS(sums);
    }
    sums *= unit;
    memcpy(y, &sums, R * sizeof *y);
}

/* R rows of INT8 times N vectors; R and N are known where it is inlined. */
static inline __attribute__((always_inline)) void block_int8(
    const Matrix *matrix, int R, const Whole *x, int N, float *const *y, int row)
{
    Ints high[TOGETHER][4] = {0}, low[TOGETHER][4] = {0};
    int columns = matrix->columns, column = 0;
    const int8_t *weights = (const int8_t *)matrix->weights + (size_t)row * columns;
    const char *ahead = (const char *)weights + BYTES_AHEAD;
    for (int n = 0; n < N; n++)
        for (int r = 0; r < R; r++)
            {
            high[n][r] = (Ints)bytes_at(x[n].starts);
            low[n][r] = (Ints)bytes_at(x[n].starts + DEEP_BYTES);
        }
    for (; column < columns; column += DEEP_BYTES, ahead += R * DEEP_BYTES) {
        Bytes w[4];
        for (int at = 0; at < R * DEEP_BYTES; at += 64)
            __builtin_prefetch(ahead + at);
        for (int r = 0; r < R; r++) {
            const int8_t *from = weights + (size_t)r * columns + column;
            if (__builtin_expect(columns - column >= DEEP_BYTES, 1)) {
                w[r] = bytes_at(from);
            } else {
                w[r] = (Bytes){0};
                memcpy(&w[r], from, columns - column);
            }
            w[r] ^= (int8_t)BIAS;
        }
        for (int n = 0; n < N; n++) {
            Bytes upper = bytes_at(x[n].bytes + 2 * column);
            Bytes lower = bytes_at(x[n].bytes + 2 * column + DEEP_BYTES);
            for (int r = 0; r < R; r++) {
                high[n][r] = add_dots(high[n][r], w[r], upper);
                low[n][r] = add_dots(low[n][r], w[r], lower);
            }
        }
    }
    for (int n = 0; n < N; n++) {
        FourFloats upper = __builtin_convertvector(totals_of_ints(high[n]), FourFloats);
        FourFloats lower = __builtin_convertvector(totals_of_ints(low[n]), FourFloats);
        place_rows(upper * 256 + lower, matrix->scales + row, x[n].unit, R, y[n] + row);
    }
}

/* What is left of GROUPS groups of INT4 and of their scales, each in its quarter; zeros behind them. */
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

static inline __attribute__((always_inline)) Floats scales_at(const float *scales, size_t left)
{
#if defined(__AVX512F__)
    const __m512i order = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    __mmask8 mask = left >= GROUPS ? 15 : (__mmask8)((1u << left) - 1);
    __m128 four = _mm_maskz_loadu_ps(mask, scales);
    return (Floats)_mm512_permutexvar_ps(order, _mm512_castps128_ps512(four));
#elif defined(__AVX2__)
    __m128 first = _mm_broadcast_ss(scales), none = _mm_setzero_ps();
    return (Floats)_mm256_set_m128(left >= GROUPS ? _mm_broadcast_ss(scales + 1) : none, first);
#else
    (void)left;
    return (Floats){0} + *scales;
#endif
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

static inline __attribute__((always_inline)) void add_groups(
    const uint8_t *pairs, const float *scales, size_t groups, size_t group, size_t left, int R,
    const Whole *x, int N, Floats (*sums)[4])
{
    Bytes first[4], second[4];
    Floats scale[4];
    for (int r = 0; r < R; r++) {
        Bytes both = groups_at(pairs + (r * groups + group) * (GROUP / 2), left);
        first[r] = both & 15;
        typedef uint16_t Wide __attribute__((vector_size(DEEP_BYTES)));
        second[r] = (Bytes)((Wide)both >> 4) & 15;
        scale[r] = scales_at(scales + r * groups + group, left);
    }
    for (int n = 0; n < N; n++) {
        const char *bytes = x[n].bytes + group / GROUPS * 4 * DEEP_BYTES;
        for (int r = 0; r < R; r++) {
            Ints sum = add_dots((Ints){0}, first[r], bytes_at(bytes));
            sum = add_dots(sum, second[r], bytes_at(bytes + DEEP_BYTES)) << 8;
            sum = add_dots(sum, first[r], bytes_at(bytes + 2 * DEEP_BYTES));
            sum = add_dots(sum, second[r], bytes_at(bytes + 3 * DEEP_BYTES));
            sums[n][r] += __builtin_convertvector(sum, Floats) * scale[r];
        }
    }
}

/* R rows of INT4 times N vectors. */
static inline __attribute__((always_inline)) void block_int4(
    const Matrix *matrix, int R, const Whole *x, int N, float *const *y, int row)
{
    Floats sums[TOGETHER][4] = {0};
    size_t groups = (size_t)matrix->columns / GROUP, group = 0;
    const uint8_t *pairs = (const uint8_t *)matrix->weights + row * groups * (GROUP / 2);
    const float *scales = matrix->scales + row * groups;
    const char *ahead = (const char *)pairs + BYTES_AHEAD;
    for (size_t at = 0; at < R * groups; at += 16)
        __builtin_prefetch((const char *)(scales + at) + BYTES_AHEAD / 4);
    for (size_t at = 0; at < groups; at += WIDTH)
        for (int r = 0; r < R; r++) {
            Floats scale = floats_at(scales + r * groups + at, groups - at);
            for (int n = 0; n < N; n++)
                sums[n][r] += scale
                    * floats_at((const float *)x[n].starts + at, groups - at);
        }
    for (; group + GROUPS <= groups; group += GROUPS, ahead += R * DEEP_BYTES) {
        for (int at = 0; at < R * DEEP_BYTES; at += 64)
            __builtin_prefetch(ahead + at);
        add_groups(pairs, scales, groups, group, GROUPS, R, x, N, sums);
    }
    if (group < groups)
        add_groups(pairs, scales, groups, group, groups - group, R, x, N, sums);
    for (int n = 0; n < N; n++)
        place_rows(totals_of_floats(sums[n]), NULL, x[n].unit, R, y[n] + row);
}

/* Rows times N vectors. */
static inline __attribute__((always_inline)) void rows_times(
    const Matrix *matrix, int format, const Whole *x, int N, int begin, int end, float *const *y)
{
    int row = begin;
    for (; row + ROWS_OF(N) <= end; row += ROWS_OF(N))
        if (format == INT8)
            block_int8(matrix, ROWS_OF(N), x, N, y, row);
        else
            block_int4(matrix, ROWS_OF(N), x, N, y, row);
    for (; row < end; row++)
        if (format == INT8)
            block_int8(matrix, 1, x, N, y, row);
        else
            block_int4(matrix, 1, x, N, y, row);
}

/* A few rows, which are read once for all vectors, one after another. */
static inline __attribute__((always_inline)) void near_rows(
    const Matrix *matrix, int format, const Whole *x, int count, int begin, int end,
    float *const *y)
{
    int n = 0;
    for (; n + TOGETHER <= count; n += TOGETHER)
        rows_times(matrix, format, x + n, TOGETHER, begin, end, y + n);
    if (TOGETHER > 2 && count - n == 2)
        rows_times(matrix, format, x + n, 2, begin, end, y + n);
    else if (count > n)
        rows_times(matrix, format, x + n, 1, begin, end, y + n);
}

/* y[n][row] = matrix[row] . x[n] for rows from begin to end. */
static __attribute__((noinline)) void multiply_whole(
    const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y,
    float *scratch)
{
    size_t each = vector_floats(matrix->columns);
    int16_t *numbers = (int16_t *)(scratch + ROUNDED_VECTORS * each);
    Whole rounded[ROUNDED_VECTORS];
    for (int done = 0, now; done < count; done += now) {
        now = count - done < ROUNDED_VECTORS ? count - done : ROUNDED_VECTORS;
        int most = now <= TOGETHER ? end - begin : now <= MOST_VECTORS ? 4 : ROWS_NEAR; /* rows */
        for (int n = 0; n < now; n++)
            rounded[n] = part_vector(x[done + n].wide, matrix->columns, matrix->format, numbers,
                                     scratch + n * each);
        for (int row = begin, stop; row < end; row = stop) {
            stop = end - row < most ? end : row + most;
            if (matrix->format == INT8)
                near_rows(matrix, INT8, rounded, now, row, stop, y + done);
            else
                near_rows(matrix, INT4, rounded, now, row, stop, y + done);
        }
    }
}
#endif

#endif
