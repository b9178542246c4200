/* Rows of a weight matrix times a few vectors, in four formats of weights.
 *
 * A decode step reads each weight once and has few vectors to multiply it with, so memory sets the
 * pace: weights are read where they lie, row by row, and every vector is served from one reading.
 */

#ifndef BUDDY_MATRIX_H
#define BUDDY_MATRIX_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#include <immintrin.h>
#define HAS_BF16_DOT 1
#else
#define HAS_BF16_DOT 0
#endif

enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

#define GROUP 32 /* weights that share a scale in INT4 */
#define MOST_VECTORS 8

typedef uint16_t bf16;

typedef struct {
    const void *weights; /* [rows, columns]; INT4: two to a byte, columns 0-15 and 16-31 of a group */
    const float *scales; /* INT8: [rows]; INT4: [rows, columns / GROUP] */
    const float *bias;   /* [rows] or NULL */
    int32_t rows, columns, format;
} Matrix;

static inline float widen(bf16 value)
{
    union { uint32_t bits; float value; } u = {(uint32_t)value << 16};
    return u.value;
}

/* To the nearest, ties to even; NaN stays NaN. */
static inline bf16 narrow(float value)
{
    union { float value; uint32_t bits; } u = {value};
    uint32_t rounded = (u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16;
    return (bf16)((u.bits & 0x7fffffff) > 0x7f800000 ? (u.bits >> 16) | 0x40 : rounded);
}

/* A vector in both number formats; `narrow` is what the dot product of bfloat16 reads. */
typedef struct {
    const float *wide;
    const bf16 *narrow;
} Vector;

static inline float dot_float(const float *restrict a, const float *restrict b, int count)
{
    float sum = 0;
    for (int i = 0; i < count; i++)
        sum += a[i] * b[i];
    return sum;
}

#define AT_ONCE 4

/* One row times several vectors, whose sums do not wait for each other. */
static inline void dots_float(
    const float *restrict a, const Vector *x, int count, float *restrict out)
{
    const float *restrict x0 = x[0].wide, *restrict x1 = x[1].wide;
    const float *restrict x2 = x[2].wide, *restrict x3 = x[3].wide;
    float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    for (int i = 0; i < count; i++) {
        s0 += a[i] * x0[i];
        s1 += a[i] * x1[i];
        s2 += a[i] * x2[i];
        s3 += a[i] * x3[i];
    }
    out[0] = s0, out[1] = s1, out[2] = s2, out[3] = s3;
}

static inline float dot_bf16(const bf16 *restrict a, const float *restrict b, int count)
{
    float sum = 0;
    for (int i = 0; i < count; i++)
        sum += widen(a[i]) * b[i];
    return sum;
}

static inline float dot_int8(const int8_t *restrict a, const float *restrict b, int count)
{
    float sum = 0;
    for (int i = 0; i < count; i++)
        sum += (float)a[i] * b[i];
    return sum;
}

static inline float dot_int4(
    const uint8_t *restrict a, const float *restrict scales, const float *restrict b, int count)
{
    float sum = 0;
    for (int group = 0; group < count / GROUP; group++) {
        float part[GROUP / 2];
        for (int i = 0; i < GROUP / 2; i++) {
            uint8_t pair = a[group * (GROUP / 2) + i];
            part[i] = (float)((int)(pair & 15) - 8) * b[group * GROUP + i];
            part[i] += (float)((int)(pair >> 4) - 8) * b[group * GROUP + GROUP / 2 + i];
        }
        float total = 0;
        for (int i = 0; i < GROUP / 2; i++)
            total += part[i];
        sum += total * scales[group];
    }
    return sum;
}

/* One row of a matrix, widened. */
static void widen_row(const Matrix *matrix, int row, float *restrict out)
{
    int columns = matrix->columns;
    size_t at = (size_t)row * columns;
    if (matrix->format == FLOAT32) {
        memcpy(out, (const float *)matrix->weights + at, sizeof(float) * columns);
    } else if (matrix->format == BFLOAT16) {
        const bf16 *weights = (const bf16 *)matrix->weights + at;
        for (int i = 0; i < columns; i++)
            out[i] = widen(weights[i]);
    } else if (matrix->format == INT8) {
        const int8_t *weights = (const int8_t *)matrix->weights + at;
        float scale = matrix->scales[row];
        for (int i = 0; i < columns; i++)
            out[i] = (float)weights[i] * scale;
    } else {
        const uint8_t *weights = (const uint8_t *)matrix->weights + at / 2;
        const float *scales = matrix->scales + at / GROUP;
        for (int group = 0; group < columns / GROUP; group++)
            for (int i = 0; i < GROUP / 2; i++) {
                uint8_t pair = weights[group * (GROUP / 2) + i];
                out[group * GROUP + i] = (float)((int)(pair & 15) - 8) * scales[group];
                out[group * GROUP + GROUP / 2 + i] = (float)((int)(pair >> 4) - 8) * scales[group];
            }
    }
}

static inline float dot_row(const Matrix *matrix, int row, const float *x)
{
    int columns = matrix->columns;
    size_t at = (size_t)row * columns;
    switch (matrix->format) {
    case FLOAT32:
        return dot_float((const float *)matrix->weights + at, x, columns);
    case BFLOAT16:
        return dot_bf16((const bf16 *)matrix->weights + at, x, columns);
    case INT8:
        return dot_int8((const int8_t *)matrix->weights + at, x, columns) * matrix->scales[row];
    default:
        return dot_int4(
            (const uint8_t *)matrix->weights + at / 2, matrix->scales + at / GROUP, x, columns);
    }
}

#if HAS_BF16_DOT
/* How far ahead of its use memory is asked for: rows are shorter than what the processor needs to
 * foresee them, but one follows the other. */
#define BYTES_AHEAD 8192
#define SUMS 16

/* The sum of each of 16 vectors' elements. All are added in the same order. */
static inline void add_up(const __m512 *x, float *out)
{
    __m512 t[8];
    for (int i = 0; i < 8; i++)
        t[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x44),
                             _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xee));
    for (int i = 0; i < 4; i++)
        t[i] = _mm512_add_ps(_mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0xdd));
    /* Four sums to a vector now, each in a quarter of four elements. */
    for (int i = 0; i < 2; i++) {
        __m512d a = _mm512_castps_pd(t[2 * i]), b = _mm512_castps_pd(t[2 * i + 1]);
        t[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    t[0] = _mm512_add_ps(_mm512_shuffle_ps(t[0], t[1], 0x88), _mm512_shuffle_ps(t[0], t[1], 0xdd));
    /* Element 4 q + k is the sum of vector 4 k + q. */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_ps(out, _mm512_permutexvar_ps(order, t[0]));
}

/* R rows times N vectors, at most 16 sums; both are known where it is inlined. */
static inline __attribute__((always_inline)) void block_bf16(
    const bf16 *weights, int columns, int R, const Vector *x, int N, float *const *y, int row)
{
    __m512 sums[SUMS];
    for (int i = 0; i < SUMS; i++)
        sums[i] = _mm512_setzero_ps();
    for (int column = 0; column < columns; column += 32) {
        int left = columns - column;
        __mmask32 mask = left >= 32 ? ~(__mmask32)0 : ((__mmask32)1 << left) - 1;
        const char *ahead = (const char *)(weights + (size_t)column * R) + BYTES_AHEAD;
        __m512bh w[R];
        for (int r = 0; r < R; r++) {
            _mm_prefetch(ahead + r * 64, _MM_HINT_T0);
            w[r] = (__m512bh)_mm512_maskz_loadu_epi16(mask, weights + (size_t)r * columns + column);
        }
        for (int n = 0; n < N; n++) {
            __m512bh v = (__m512bh)_mm512_maskz_loadu_epi16(mask, x[n].narrow + column);
            for (int r = 0; r < R; r++)
                sums[n * R + r] = _mm512_dpbf16_ps(sums[n * R + r], w[r], v);
        }
    }
    float out[SUMS];
    add_up(sums, out);
    for (int n = 0; n < N; n++)
        memcpy(y[n] + row, out + n * R, R * sizeof(float));
}

#define ROWS_TIMES(N, R)                                                                           \
    case N:                                                                                        \
        for (; row + R <= end; row += R)                                                           \
            block_bf16(weights + (size_t)row * columns, columns, R, x, N, y, row);                 \
        for (; row < end; row++)                                                                   \
            block_bf16(weights + (size_t)row * columns, columns, 1, x, N, y, row);                 \
        break;

static void rows_bf16(
    const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y)
{
    const bf16 *weights = matrix->weights;
    int columns = matrix->columns, row = begin;
    switch (count) {
        ROWS_TIMES(1, 8)
        ROWS_TIMES(2, 8)
        ROWS_TIMES(3, 5)
        ROWS_TIMES(4, 4)
        ROWS_TIMES(5, 3)
        ROWS_TIMES(6, 2)
        ROWS_TIMES(7, 2)
        ROWS_TIMES(8, 2)
    }
}
#endif

/* Rows that stay in the nearest cache while all vectors pass. */
#define ROWS_AT_ONCE 16

static void multiply_few(
    const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y,
    float *scratch)
{
#if HAS_BF16_DOT
    if (matrix->format == BFLOAT16) {
        rows_bf16(matrix, x, count, begin, end, y);
        return;
    }
#endif
    for (int row = begin; row < end; row++) {
        if (count == 1) {
            y[0][row] = dot_row(matrix, row, x[0].wide);
            continue;
        }
        widen_row(matrix, row, scratch);
        int n = 0;
        for (; n + AT_ONCE <= count; n += AT_ONCE) {
            float out[AT_ONCE];
            dots_float(scratch, x + n, matrix->columns, out);
            for (int i = 0; i < AT_ONCE; i++)
                y[n + i][row] = out[i];
        }
        for (; n < count; n++)
            y[n][row] = dot_float(scratch, x[n].wide, matrix->columns);
    }
}

#endif
