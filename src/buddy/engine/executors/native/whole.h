/* Rows of 8 bits times vectors in whole numbers of 16 bits; nibbles.h has those of 4 bits.
 *
 * A vector's largest number becomes 32,767 of its units, so an element moves by at most 2^-16 of the
 * largest, which bfloat16 itself may move by 2^-9. One instruction multiplies twice as many of these as
 * of floats, and weights need not be made floats: whole numbers are added up, exactly, and scaled once
 * for a row (INT8) or for a group (INT8_GROUPS).
 */

#ifndef BUDDY_WHOLE_H
#define BUDDY_WHOLE_H

#include "nibbles.h"

#if !HAS_BYTE_DOT
#define PARTS (GROUP / SHORTS) /* of a group, SHORTS each */

/* Columns of INT8 whose products an Ints holds: 128 times 32,767, 512 times. */
#define EXACT_COLUMNS (512 * WIDTH)

#define ROWS_NEAR 16 /* which stay in the nearest cache while many vectors pass */
#define ROUNDED_VECTORS 64 /* at once */
#define LARGEST 32767
#define MOST_COLUMNS INT32_MAX

/* The next SHORTS weights of INT8. */
static inline Shorts shorts_of(const int8_t *from)
{
#if defined(__AVX512BW__)
    return (Shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)from));
#elif defined(__AVX2__)
    return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)from));
#else
    int8_t bytes __attribute__((vector_size(SHORTS)));
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Shorts);
#endif
}

/* A vector's whole numbers, then zeros to a multiple of SHORTS. For rows of 4 bits the first of some that
 * round_groups has made. */
typedef struct {
    const void *numbers;
    const float *starts; /* 4 bits */
    float unit;          /* what one is worth, but for these */
} Whole;

/* Of 16 bits that hold these. */
static size_t whole_columns(int columns)
{
    size_t step = GROUPS * GROUP;
    return ((size_t)columns + step - 1) / step * step;
}

static Whole pad_vector(const float *x, int columns, int16_t *out)
{
    memset(out + columns, 0, sizeof *out * (whole_columns(columns) - columns));
    return (Whole){out, NULL, round_vector(x, columns, LARGEST, out)};
}

/* The last weights of a row of INT8, fewer than SHORTS, and zeros. */
static inline Shorts last_shorts(const Matrix *matrix, size_t row, int column)
{
    int8_t rest[SHORTS] = {0};
    memcpy(rest, (const int8_t *)matrix->weights + row * matrix->columns + column,
           matrix->columns - column);
    return shorts_of(rest);
}

/* R rows times N vectors, from one column to another, added up in whole numbers. */
static inline __attribute__((always_inline)) void add_columns(
    const Matrix *matrix, int R, const Whole *x, int N, int row, int begin, int end, Floats *totals)
{
    Ints sums[MOST_SUMS], kept[MOST_SUMS]; /* in memory, as the sums are not until the last columns */
    const int8_t *weights = (const int8_t *)matrix->weights + (size_t)row * matrix->columns;
    const char *ahead = (const char *)weights + begin * R + BYTES_AHEAD;
    int full = begin + (end - begin) / SHORTS * SHORTS, column = begin;
    for (int i = 0; i < R * N; i++)
        sums[i] = (Ints){0};
    for (; column < full; column += SHORTS, ahead += R * SHORTS) {
        Shorts w[MOST_SUMS], v;
        for (int at = 0; at < R * SHORTS; at += 64)
            __builtin_prefetch(ahead + at);
        for (int r = 0; r < R; r++)
            w[r] = shorts_of(weights + (size_t)r * matrix->columns + column);
        for (int n = 0; n < N; n++) {
            memcpy(&v, (const int16_t *)x[n].numbers + column, sizeof v);
            for (int r = 0; r < R; r++)
                sums[n * R + r] += pair_sums(w[r], v);
        }
    }
    for (int i = 0; i < R * N; i++)
        kept[i] = sums[i];
    for (int r = 0; column < end && r < R; r++)
        for (int n = 0; n < N; n++) {
            Shorts v;
            memcpy(&v, (const int16_t *)x[n].numbers + column, sizeof v);
            kept[n * R + r] += pair_sums(last_shorts(matrix, row + r, column), v);
        }
    for (int i = 0; i < R * N; i++)
        totals[i] = __builtin_convertvector(kept[i], Floats);
}

/* R rows of INT8 times N vectors; R and N are known where it is inlined. */
static inline __attribute__((always_inline)) void block_by_row(
    const Matrix *matrix, int R, const Whole *x, int N, float *const *y, int row)
{
    Floats totals[MOST_SUMS], more[MOST_SUMS];
    float out[MOST_SUMS];
    int columns = matrix->columns, end = columns < EXACT_COLUMNS ? columns : EXACT_COLUMNS;
    add_columns(matrix, R, x, N, row, 0, end, totals);
    for (int begin = end; begin < columns; begin = end) {
        end = columns - begin < EXACT_COLUMNS ? columns : begin + EXACT_COLUMNS;
        add_columns(matrix, R, x, N, row, begin, end, more);
        for (int i = 0; i < R * N; i++)
            totals[i] += more[i];
    }
    totals_of(totals, R * N, out);
    for (int n = 0; n < N; n++)
        for (int r = 0; r < R; r++) {
            float scaled = out[n * R + r] * matrix->scales[row + r];
            AS_IT_IS(scaled);
            y[n][row + r] = scaled * x[n].unit;
        }
}

/* R rows of INT8_GROUPS times N vectors. */
static inline __attribute__((always_inline)) void block_by_group(
    const Matrix *matrix, int R, const Whole *x, int N, float *const *y, int row)
{
    Floats sums[MOST_SUMS], kept[MOST_SUMS];
    float out[MOST_SUMS];
    size_t groups = (size_t)matrix->columns / GROUP;
    const int8_t *weights = (const int8_t *)matrix->weights + row * groups * GROUP;
    const float *scales = matrix->scales + row * groups;
    ask_for_groups(matrix, INT8_GROUPS, R, row);
    for (int i = 0; i < R * N; i++)
        sums[i] = (Floats){0};
    for (size_t group = 0; group < groups; group++) {
        Shorts w[MOST_SUMS][PARTS], v[PARTS];
        for (int at = 0; at < R * GROUP; at += 64)
            __builtin_prefetch(weights + group * R * GROUP + at + BYTES_AHEAD);
        for (int r = 0; r < R; r++)
            for (int part = 0; part < PARTS; part++)
                w[r][part] = shorts_of(weights + (r * groups + group) * GROUP + part * SHORTS);
        for (int n = 0; n < N; n++) {
            for (int part = 0; part < PARTS; part++)
                memcpy(&v[part], (const int16_t *)x[n].numbers + group * GROUP + part * SHORTS,
                       sizeof *v);
            for (int r = 0; r < R; r++) {
                Ints sum = pair_sums(w[r][0], v[0]);
                for (int part = 1; part < PARTS; part++)
                    sum += pair_sums(w[r][part], v[part]);
                sums[n * R + r] += __builtin_convertvector(sum, Floats) * scales[r * groups + group];
            }
        }
    }
    for (int i = 0; i < R * N; i++)
        kept[i] = sums[i];
    totals_of(kept, R * N, out);
    for (int n = 0; n < N; n++)
        for (int r = 0; r < R; r++)
            y[n][row + r] = out[n * R + r] * x[n].unit;
}

static inline __attribute__((always_inline)) void block_whole(
    const Matrix *matrix, int format, int R, const Whole *x, int N, float *const *y, int row)
{
    if (format == INT8)
        block_by_row(matrix, R, x, N, y, row);
    else if (format == INT8_GROUPS)
        block_by_group(matrix, R, x, N, y, row);
    else
        block_int4(matrix, format, R, x->numbers, x->starts, N, y, row);
}

/* Rows from begin to end times N vectors, R at a time. */
static inline __attribute__((always_inline)) void rows_by(
    const Matrix *matrix, int format, int R, const Whole *x, int N, int begin, int end,
    float *const *y)
{
    int row = begin;
    for (; row + R <= end; row += R)
        block_whole(matrix, format, R, x, N, y, row);
    for (; row < end; row++)
        block_whole(matrix, format, 1, x, N, y, row);
}

/* Rows times up to four vectors, as many at a time as there are registers for sums. */
static inline __attribute__((always_inline)) void rows_whole(
    const Matrix *matrix, int format, const Whole *x, int count, int begin, int end,
    float *const *y)
{
    if (count == 1)
        rows_by(matrix, format, 4, x, 1, begin, end, y);
    else if (count == 2)
        rows_by(matrix, format, is_int4(format) ? 2 : 4, x, 2, begin, end, y);
    else if (count == 3)
        rows_by(matrix, format, 2, x, 3, begin, end, y);
    else
        rows_by(matrix, format, 2, x, 4, begin, end, y);
}

/* Floats that hold rounded vectors and sums of their groups. */
static size_t whole_floats(int columns)
{
    return (whole_columns(columns) / 2 + columns / GROUP) * ROUNDED_VECTORS;
}

/* y[n][row] = matrix[row] . x[n] for rows from begin to end. */
static __attribute__((noinline)) void multiply_whole(
    const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y,
    float *scratch)
{
    size_t width = whole_columns(matrix->columns), groups = matrix->columns / GROUP;
    int16_t *numbers = (int16_t *)(scratch + groups * ROUNDED_VECTORS);
    Whole rounded[ROUNDED_VECTORS];
    for (int done = 0, now; done < count; done += now) {
        now = count - done < ROUNDED_VECTORS ? count - done : ROUNDED_VECTORS;
        int most = now <= 4 ? end - begin : now <= MOST_VECTORS ? 4 : ROWS_NEAR; /* rows */
        for (int n = 0; n < now; n++) {
            int four = n / 4 * 4, N = now - four < 4 ? now - four : 4;
            if (is_int4(matrix->format)) {
                char *first = (char *)(numbers + four * width);
                round_groups(x[done + n].wide, matrix->columns, matrix->format, N,
                             first + (n - four) * STEP_BYTES, scratch + n * groups);
                rounded[n] = (Whole){first, scratch + four * groups, 1};
            } else {
                rounded[n] = pad_vector(x[done + n].wide, matrix->columns, numbers + n * width);
            }
        }
        for (int row = begin, stop; row < end; row = stop) {
            stop = end - row < most ? end : row + most;
            for (int n = 0; n < now; n += 4) {
                int four = now - n < 4 ? now - n : 4;
                if (matrix->format == INT8)
                    rows_whole(matrix, INT8, rounded + n, four, row, stop, y + done + n);
                else if (matrix->format == INT8_GROUPS)
                    rows_whole(matrix, INT8_GROUPS, rounded + n, four, row, stop, y + done + n);
                else if (matrix->format == INT4)
                    rows_whole(matrix, INT4, rounded + n, four, row, stop, y + done + n);
                else if (matrix->format == INT4_HALVES)
                    rows_whole(matrix, INT4_HALVES, rounded + n, four, row, stop, y + done + n);
                else
                    rows_whole(matrix, INT4_BYTES, rounded + n, four, row, stop, y + done + n);
            }
        }
    }
}
#endif

#endif
