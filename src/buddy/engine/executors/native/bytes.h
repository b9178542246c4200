/* Rows of fewer bits times vectors in whole numbers, by dot products of bytes.
 *
 * Sums of INT8 are exact for a whole row, others for a group.
 */

#ifndef BUDDY_BYTES_H
#define BUDDY_BYTES_H

#include "byte_vectors.h"

#if HAS_BYTE_DOT
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

static size_t whole_floats(int columns)
{
    return ROUNDED_VECTORS * vector_floats(columns) + steps_of_bytes(columns, INT4) * GROUPS * GROUP / 2;
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

/* What is left of DEEP_BYTES weights, and zeros behind them, as dot products read them. */
static inline __attribute__((always_inline)) Bytes weights_at(const int8_t *from, size_t left)
{
    Bytes w = {0};
    if (__builtin_expect(left >= DEEP_BYTES, 1))
        w = bytes_at(from);
    else
        memcpy(&w, from, left);
    return w ^ (int8_t)BIAS;
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
        for (int r = 0; r < R; r++)
            w[r] = weights_at(weights + (size_t)r * columns + column, columns - column);
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

/* Scales of what is left of DEEP_BYTES weights, each on as many sums as its group has; zeros behind. */
static inline __attribute__((always_inline)) Floats group_scales_at(const float *scales, size_t left)
{
#if defined(__AVX512F__)
    __m256 none = _mm256_setzero_ps(), second = left >= DEEP_BYTES ? _mm256_set1_ps(scales[1]) : none;
    return (Floats)_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_set1_ps(*scales)), second, 1);
#else
    (void)left;
    return (Floats){0} + *scales;
#endif
}

/* R rows of INT8_GROUPS times N vectors. */
static inline __attribute__((always_inline)) void block_int8_groups(
    const Matrix *matrix, int R, const Whole *x, int N, float *const *y, int row)
{
    Floats sums[TOGETHER][4] = {0};
    size_t columns = matrix->columns, groups = columns / GROUP;
    const int8_t *weights = (const int8_t *)matrix->weights + row * columns;
    const float *scales = matrix->scales + row * groups;
    const char *ahead = (const char *)weights + BYTES_AHEAD;
    for (size_t at = 0; at < R * groups; at += 16)
        __builtin_prefetch((const char *)(scales + at) + BYTES_AHEAD / 8);
    for (size_t column = 0; column < columns; column += DEEP_BYTES, ahead += R * DEEP_BYTES) {
        Bytes w[4];
        Floats scale[4];
        for (int at = 0; at < R * DEEP_BYTES; at += 64)
            __builtin_prefetch(ahead + at);
        for (int r = 0; r < R; r++) {
            w[r] = weights_at(weights + r * columns + column, columns - column);
            scale[r] = group_scales_at(scales + r * groups + column / GROUP, columns - column);
        }
        for (int n = 0; n < N; n++) {
            const char *bytes = x[n].bytes + 3 * column;
            Ints start = (Ints)bytes_at(bytes + 2 * DEEP_BYTES);
            for (int r = 0; r < R; r++) {
                Ints sum = (add_dots((Ints){0}, w[r], bytes_at(bytes)) << 8) + start;
                sum = add_dots(sum, w[r], bytes_at(bytes + DEEP_BYTES));
                sums[n][r] += __builtin_convertvector(sum, Floats) * scale[r];
            }
        }
    }
    for (int n = 0; n < N; n++)
        place_rows(totals_of_floats(sums[n]), NULL, x[n].unit, R, y[n] + row);
}

/* Sums of a row's numbers in GROUPS groups times a vector's, each group's in its quarter. */
static inline __attribute__((always_inline)) Floats group_sums(Bytes first, Bytes second, const char *x)
{
    Ints sum = add_dots((Ints){0}, first, bytes_at(x));
    sum = add_dots(sum, second, bytes_at(x + DEEP_BYTES)) << 8;
    sum = add_dots(sum, first, bytes_at(x + 2 * DEEP_BYTES));
    sum = add_dots(sum, second, bytes_at(x + 3 * DEEP_BYTES));
    return __builtin_convertvector(sum, Floats);
}

static inline __attribute__((always_inline)) void add_groups(
    const Matrix *matrix, int format, int row, size_t group, size_t left, int R, const Whole *x, int N,
    Floats (*sums)[4])
{
    Bytes first[4], second[4];
    Floats scale[4];
    unpack_groups(matrix, format, row, group, left, R, first, second, scale);
    for (int n = 0; n < N; n++) {
        const char *bytes = x[n].bytes + group / GROUPS * 4 * DEEP_BYTES;
        for (int r = 0; r < R; r++)
            sums[n][r] += group_sums(first[r], second[r], bytes) * scale[r];
    }
}

/* Groups that share units of scales, by which sums are multiplied first. */
static inline __attribute__((always_inline)) void add_super(
    const Matrix *matrix, int row, size_t group, int R, const Whole *x, int N, Floats (*sums)[4])
{
    size_t groups = (size_t)matrix->columns / GROUP, at = row * groups + group;
    Floats parts[TOGETHER][4] = {0};
#pragma GCC unroll 8
    for (int g = 0; g < SUPER; g += GROUPS) {
        Bytes first[4], second[4];
        Floats scale[4];
        unpack_numbers(matrix, row, group + g, GROUPS, R, first, second);
        for (int r = 0; r < R; r++) {
            Ints scales = byte_scales_at((const uint8_t *)matrix->scales + at + r * groups, g, 32);
            scale[r] = __builtin_convertvector(scales, Floats);
        }
        for (int n = 0; n < N; n++)
            for (int r = 0; r < R; r++) {
                const char *bytes = x[n].bytes + (group + g) / GROUPS * 4 * DEEP_BYTES;
                parts[n][r] += group_sums(first[r], second[r], bytes) * scale[r];
                AS_IT_IS(parts[n][r]);
            }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++)
            sums[n][r] += parts[n][r] * matrix->units[(at + r * groups) / SUPER * 2];
}

/* R rows of 4 bits times N vectors. */
static inline __attribute__((always_inline)) void block_int4(
    const Matrix *matrix, int format, int R, const Whole *x, int N, float *const *y, int row)
{
    Floats sums[TOGETHER][4] = {0};
    size_t groups = (size_t)matrix->columns / GROUP, group = 0;
    const char *ahead = (const char *)matrix->weights + row * groups * (GROUP / 2) + BYTES_AHEAD;
    ask_for_groups(matrix, format, R, row);
    for (size_t at = 0; at < groups; at += WIDTH)
        for (int r = 0; r < R; r++) {
            Floats minimum = minimums_at(matrix, format, (row + r) * groups + at, groups - at);
            for (int n = 0; n < N; n++)
                sums[n][r] += minimum
                    * floats_at((const float *)x[n].starts + at, groups - at);
        }
    for (; format == INT4_BYTES && group < groups; group += SUPER) {
        for (int at = 0; at < R * SUPER * GROUP / 2; at += 64, ahead += 64)
            __builtin_prefetch(ahead);
        add_super(matrix, row, group, R, x, N, sums);
    }
    for (; group + GROUPS <= groups; group += GROUPS, ahead += R * DEEP_BYTES) {
        for (int at = 0; at < R * DEEP_BYTES; at += 64)
            __builtin_prefetch(ahead + at);
        add_groups(matrix, format, row, group, GROUPS, R, x, N, sums);
    }
    if (group < groups)
        add_groups(matrix, format, row, group, groups - group, R, x, N, sums);
    for (int n = 0; n < N; n++)
        place_rows(totals_of_floats(sums[n]), NULL, x[n].unit, R, y[n] + row);
}

static inline __attribute__((always_inline)) void block_whole(
    const Matrix *matrix, int format, int R, const Whole *x, int N, float *const *y, int row)
{
    if (format == INT8)
        block_int8(matrix, R, x, N, y, row);
    else if (format == INT8_GROUPS)
        block_int8_groups(matrix, R, x, N, y, row);
    else
        block_int4(matrix, format, R, x, N, y, row);
}

/* Rows times N vectors. */
static inline __attribute__((always_inline)) void rows_times(
    const Matrix *matrix, int format, const Whole *x, int N, int begin, int end, float *const *y)
{
    int row = begin;
    for (; row + ROWS_OF(N) <= end; row += ROWS_OF(N))
        block_whole(matrix, format, ROWS_OF(N), x, N, y, row);
    for (; row < end; row++)
        block_whole(matrix, format, 1, x, N, y, row);
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
            else if (matrix->format == INT8_GROUPS)
                near_rows(matrix, INT8_GROUPS, rounded, now, row, stop, y + done);
            else if (matrix->format == INT4)
                near_rows(matrix, INT4, rounded, now, row, stop, y + done);
            else if (matrix->format == INT4_HALVES)
                near_rows(matrix, INT4_HALVES, rounded, now, row, stop, y + done);
            else
                near_rows(matrix, INT4_BYTES, rounded, now, row, stop, y + done);
        }
    }
}
#endif

#endif
