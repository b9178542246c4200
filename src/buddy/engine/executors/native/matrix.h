/* Rows of a weight matrix times a few vectors, in seven formats of weights.
 *
 * A decode step reads each weight once and has few vectors to multiply it with, so memory sets the
 * pace: weights are read where they lie, row by row, and every vector is served from one reading.
 */

#ifndef BUDDY_MATRIX_H
#define BUDDY_MATRIX_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define HAS_BF16_DOT 1
#else
#define HAS_BF16_DOT 0
#endif

/* Dot products of bytes, in registers of WIDTH floats. */
#if (defined(__AVX512VNNI__) && defined(__AVX512BW__)) || defined(__ARM_FEATURE_DOTPROD)           \
    || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define HAS_BYTE_DOT 1
#else
#define HAS_BYTE_DOT 0
#endif

/* Of INT4 number 8 is zero; of INT4_HALVES and INT4_BYTES number 0 is the group's minimum. Scales and
 * minimums are in float16 in the former, and in the latter in bytes, of units that SUPER groups share. */
enum {
    FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, INT8_GROUPS = 4, INT4_HALVES = 5, INT4_BYTES = 6
};

#define GROUP 32 /* weights that share a scale, but in INT8, which has one for a row */
#define SUPER 8  /* groups that share units */
#define ZERO 8   /* the number of INT4 that stands for zero */
#define MOST_VECTORS 8

typedef uint16_t bf16;

typedef struct Matrix {
    const void *weights; /* [rows, columns]; 4 bits: two to a byte, columns 0-15 and 16-31 of a group */
    const float *scales; /* INT8: [rows]; of groups: [rows, columns / GROUP]; else NULL */
    const float *minimums; /* as scales, or NULL */
    const float *units;    /* INT4_BYTES: [rows, columns / GROUP / SUPER, 2], of scales and of minimums */
    const float *bias;     /* [rows] or NULL */
    int32_t rows, columns, format;
    int32_t by_dots; /* with vectors of bfloat16 where the processor has dot products of these; of
                        fewer bits with whole numbers */
    /* Of an adapter that knows the depth, or NULL: up (deviations of the depth * down x) is added. */
    const struct Matrix *down; /* [rank, columns] */
    const void *up;            /* [rank, rows] in the format of `down` */
    const float *deviations;   /* [depths, rank] */
} Matrix;

static inline int is_int4(int format)
{
    return format == INT4 || format == INT4_HALVES || format == INT4_BYTES;
}

static inline int bits_of(int format)
{
    return format == FLOAT32 ? 32 : format == BFLOAT16 ? 16 : is_int4(format) ? 4 : 8;
}

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

/* The exponent of float16, read as that of float32, is 112 too small. */
static inline float of_half(uint16_t half)
{
#if defined(__F16C__)
    return _cvtsh_ss(half);
#else
    union { uint32_t bits; float value; } u = {(uint32_t)(half & 0x7fff) << 13};
    return (half & 0x8000 ? -0x1p112f : 0x1p112f) * u.value;
#endif
}

/* A product that compilers may not take apart, since sums would then be rounded otherwise. */
#if defined(__x86_64__)
#define AS_IT_IS(x) __asm__("" : "+v"(x))
#elif defined(__aarch64__)
#define AS_IT_IS(x) __asm__("" : "+w"(x))
#else
#define AS_IT_IS(x) __asm__("" : "+m"(x))
#endif

/* A group's scale or minimum, as `which` says. */
enum { SCALE = 0, MINIMUM = 1 };
static inline float group_float(const Matrix *matrix, int format, int which, size_t group)
{
    const void *from = which == SCALE ? matrix->scales : matrix->minimums;
    if (format == INT4_BYTES) {
        float worth = ((const uint8_t *)from)[group] * matrix->units[group / SUPER * 2 + which];
        AS_IT_IS(worth);
        return worth;
    }
    return format == INT4_HALVES ? of_half(((const uint16_t *)from)[group]) : ((const float *)from)[group];
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

/* How far ahead of its use memory is asked for: rows are shorter than what the processor needs to
 * foresee them, but one follows the other. */
#define BYTES_AHEAD 8192

/* Products without an instruction for bfloat16: weights are widened in registers. */
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));

/* WIDTH whole numbers as Ints. GCC turns its own conversions into more instructions than these. */
#if defined(__AVX512F__)
#define INTS_OF_U16(from) ((Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(from))))
#define INTS_OF_S8(from) ((Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(from))))
#define INTS_OF_U8(from) ((Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(from))))
#elif defined(__AVX2__)
#define INTS_OF_U16(from) ((Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(from))))
#define INTS_OF_S8(from) ((Ints)_mm256_cvtepi8_epi32(_mm_loadu_si64(from)))
#define INTS_OF_U8(from) ((Ints)_mm256_cvtepu8_epi32(_mm_loadu_si64(from)))
#else
#define CONVERTED(type, from)                                                                      \
    ({                                                                                             \
        type here __attribute__((vector_size(sizeof(type) * WIDTH)));                              \
        memcpy(&here, from, sizeof here);                                                          \
        __builtin_convertvector(here, Ints);                                                       \
    })
#define INTS_OF_U16(from) CONVERTED(uint16_t, from)
#define INTS_OF_S8(from) CONVERTED(int8_t, from)
#define INTS_OF_U8(from) CONVERTED(uint8_t, from)
#endif

/* WIDTH weights of a row, from a column on that WIDTH divides; those of INT8 without their scale. */
static inline __attribute__((always_inline)) Floats widened(
    const Matrix *matrix, int format, size_t row, int column)
{
    size_t at = row * matrix->columns + column;
    if (format == FLOAT32) {
        Floats here;
        memcpy(&here, (const float *)matrix->weights + at, sizeof here);
        return here;
    }
    if (format == BFLOAT16)
        return (Floats)(INTS_OF_U16((const bf16 *)matrix->weights + at) << 16);
    if (format == INT8)
        return __builtin_convertvector(INTS_OF_S8((const int8_t *)matrix->weights + at), Floats);
    size_t group = at / GROUP, within = at % GROUP;
    Ints number;
    if (format == INT8_GROUPS) {
        number = INTS_OF_S8((const int8_t *)matrix->weights + at);
    } else {
        Ints pairs = INTS_OF_U8(
            (const uint8_t *)matrix->weights + group * (GROUP / 2) + within % (GROUP / 2));
        number = (within < GROUP / 2 ? pairs & 15 : pairs >> 4) - (format == INT4 ? ZERO : 0);
    }
    float scale = group_float(matrix, format, SCALE, group);
    Floats scaled = __builtin_convertvector(number, Floats) * scale;
    AS_IT_IS(scaled);
    if (format > INT8_GROUPS) {
        scaled += group_float(matrix, format, MINIMUM, group);
        AS_IT_IS(scaled);
    }
    return scaled;
}

/* The last columns of a row of floats, and zeros. */
static inline Floats rest_of(const float *from, int left)
{
    Floats here = {0};
    memcpy(&here, from, sizeof(float) * left);
    return here;
}

static inline Floats rest_of_row(const Matrix *matrix, int format, size_t row, int column, int left)
{
    size_t at = row * matrix->columns + column;
    float wide[WIDTH];
    for (int i = 0; i < left; i++)
        wide[i] = format == FLOAT32  ? ((const float *)matrix->weights)[at + i]
            : format == BFLOAT16 ? widen(((const bf16 *)matrix->weights)[at + i])
                                 : (float)((const int8_t *)matrix->weights)[at + i];
    return rest_of(wide, left);
}

/* The sum of each one's elements. All are added in one order: a compiler that vectorises over `n` would
 * add those of the last few in another. */
static __attribute__((noinline)) void totals_of(const Floats *x, int count, float *out)
{
    typedef float Four __attribute__((vector_size(16)));
    for (int n = 0; n < count; n++) {
        Four sum = {0}, part;
        for (int i = 0; i < WIDTH; i += 4) {
            memcpy(&part, (const float *)(x + n) + i, sizeof part);
            sum += part;
            AS_IT_IS(sum);
        }
        Four turned = {sum[2], sum[3], sum[0], sum[1]};
        sum += turned;
        AS_IT_IS(sum);
        out[n] = sum[0] + sum[1];
    }
}

#define MOST_SUMS 12

/* R rows times N vectors; these and the format are known where it is inlined. */
static inline __attribute__((always_inline)) void block_wide(
    const Matrix *matrix, int format, int R, const Vector *x, int N, float *const *y, int row)
{
    Floats sums[MOST_SUMS];
    const float *wide[MOST_VECTORS];
    int columns = matrix->columns, column = 0;
    for (int i = 0; i < R * N; i++)
        sums[i] = (Floats){0};
    for (int n = 0; n < N; n++)
        wide[n] = x[n].wide;
    int bits = bits_of(format);
    const char *ahead =
        (const char *)matrix->weights + (size_t)row * columns * bits / 8 + BYTES_AHEAD;
    for (; column + WIDTH <= columns; column += WIDTH) {
        Floats w[MOST_SUMS];
        if (!is_int4(format)) /* which arithmetic holds up, not memory */
            for (int at = 0; at < R * WIDTH * bits / 8; at += 64)
                __builtin_prefetch(ahead + at);
        ahead += R * WIDTH * bits / 8;
        for (int r = 0; r < R; r++)
            w[r] = widened(matrix, format, row + r, column);
        for (int n = 0; n < N; n++) {
            Floats v;
            memcpy(&v, wide[n] + column, sizeof v);
            for (int r = 0; r < R; r++)
                sums[n * R + r] += w[r] * v;
        }
    }
    if (column < columns) /* no groups, which are whole */
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++)
                sums[n * R + r] += rest_of_row(matrix, format, row + r, column, columns - column)
                    * rest_of(wide[n] + column, columns - column);
    Floats kept[MOST_SUMS]; /* in memory, as the sums are not until here */
    float out[MOST_SUMS];
    for (int i = 0; i < R * N; i++)
        kept[i] = sums[i];
    totals_of(kept, R * N, out);
    for (int n = 0; n < N; n++)
        for (int r = 0; r < R; r++)
            y[n][row + r] = out[n * R + r] * (format == INT8 ? matrix->scales[row + r] : 1.0f);
}

#define WIDE_ROWS_TIMES(N, R)                                                                      \
    case N:                                                                                        \
        for (; row + R <= end; row += R)                                                           \
            block_wide(matrix, format, R, x, N, y, row);                                           \
        for (; row < end; row++)                                                                   \
            block_wide(matrix, format, 1, x, N, y, row);                                           \
        break;

static inline __attribute__((always_inline)) void rows_wide(
    const Matrix *matrix, int format, const Vector *x, int count, int begin, int end,
    float *const *y)
{
    int row = begin;
    switch (count) { /* as many sums as there are registers for */
        WIDE_ROWS_TIMES(1, 4)
        WIDE_ROWS_TIMES(2, 4)
        WIDE_ROWS_TIMES(3, 3)
        WIDE_ROWS_TIMES(4, 2)
        WIDE_ROWS_TIMES(5, 2)
        WIDE_ROWS_TIMES(6, 2)
        WIDE_ROWS_TIMES(7, 1)
        WIDE_ROWS_TIMES(8, 1)
    }
}

#if HAS_BF16_DOT
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

/* Which of the next 32 columns there are. */
static inline __mmask32 next_columns(int left)
{
    return left >= 32 ? ~(__mmask32)0 : ((__mmask32)1 << left) - 1;
}

/* R rows of bfloat16 times N vectors, at most 16 sums; R and N are known where it is inlined. */
static inline __attribute__((always_inline)) void block_dots(
    const Matrix *matrix, int R, const Vector *x, int N, float *const *y, int row)
{
    __m512 sums[SUMS];
    int columns = matrix->columns;
    const bf16 *weights = (const bf16 *)matrix->weights + (size_t)row * columns;
    for (int i = 0; i < SUMS; i++)
        sums[i] = _mm512_setzero_ps();
    const char *ahead = (const char *)weights + BYTES_AHEAD;
    for (int column = 0; column < columns; column += 32, ahead += R * 64) {
        __mmask32 mask = next_columns(columns - column);
        __m512bh w[R];
        for (int r = 0; r < R; r++)
            _mm_prefetch(ahead + r * 64, _MM_HINT_T0);
        for (int r = 0; r < R; r++)
            w[r] = (__m512bh)_mm512_maskz_loadu_epi16(mask, weights + (size_t)r * columns + column);
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
            block_dots(matrix, R, x, N, y, row);                                                   \
        for (; row < end; row++)                                                                   \
            block_dots(matrix, 1, x, N, y, row);                                                   \
        break;

static void rows_dots(
    const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y)
{
    int row = begin;
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

static __attribute__((noinline)) void multiply_few(
    const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y)
{
#if HAS_BF16_DOT
    if (matrix->by_dots && matrix->format == BFLOAT16) {
        rows_dots(matrix, x, count, begin, end, y);
        return;
    }
#endif
    switch (matrix->format) {
    case FLOAT32:
        rows_wide(matrix, FLOAT32, x, count, begin, end, y);
        break;
    case BFLOAT16:
        rows_wide(matrix, BFLOAT16, x, count, begin, end, y);
        break;
    case INT8:
        rows_wide(matrix, INT8, x, count, begin, end, y);
        break;
    case INT8_GROUPS:
        rows_wide(matrix, INT8_GROUPS, x, count, begin, end, y);
        break;
    case INT4:
        rows_wide(matrix, INT4, x, count, begin, end, y);
        break;
    case INT4_HALVES:
        rows_wide(matrix, INT4_HALVES, x, count, begin, end, y);
        break;
    default:
        rows_wide(matrix, INT4_BYTES, x, count, begin, end, y);
    }
}

#endif
