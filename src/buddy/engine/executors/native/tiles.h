/* Rows of weights times any number of vectors, by the tile registers of AMX.
 *
 * One instruction multiplies 16 rows of weights, 64 bytes deep, with 16 vectors. Weights in bfloat16
 * and INT8 are read where they lie, 4 bits are unpacked first. Vectors come in panels of 16: of two columns
 * each, those of all vectors side by side. Sums come out of the tiles with 16 vectors side by side too,
 * so what is computed of each sum alone goes into the next panel without turning it round. A sum has
 * one order whatever else is multiplied, so a sequence's numbers do not depend on those beside it.
 *
 * Bytes are multiplied with bytes: for INT8 a vector becomes integers of 16 bits, in two halves that
 * are multiplied one beside the other and added up as whole numbers, the same as in byte_vectors.h: a sum
 * has the same bits there.
 */

#ifndef BUDDY_TILES_H
#define BUDDY_TILES_H

#include "functions.h"
#include "matrix.h"
#include "rounding.h"
#include "transpose.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

#define TILE 16  /* rows of weights, and vectors, of a tile */
#define DEPTH 32 /* columns of weights of a tile */

#if HAS_TILES
/* Bytes that the products of a thread work in. */
static size_t tile_bytes(int columns)
{
    return 4 * TILE * TILE * sizeof(float) + 2 * TILE * (size_t)columns * sizeof(bf16);
}

/* Whether the kernel of the system lets this process use the registers; it must be asked once. */
static int may_use_tiles(void)
{
    enum { ASK_FOR_STATE = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
}

/* A panel of up to 16 vectors in bfloat16, of some columns; what is missing is zero. */
static void pack_panel(const bf16 *const *x, int count, int begin, int end, bf16 *panel)
{
    for (int column = begin; column < end; column += DEPTH) {
        __m512 pairs[TILE];
        for (int n = 0; n < TILE; n++)
            pairs[n] = n < count ? _mm512_loadu_ps(x[n] + column) : _mm512_setzero_ps();
        transpose(pairs);
        for (int i = 0; i < TILE; i++)
            _mm512_storeu_ps(panel + (size_t)column * TILE + i * 2 * TILE, pairs[i]);
    }
}

/* What was written must be in memory before a tile is loaded: compilers do not know that this reads. */
#define WRITTEN() __asm__ volatile("" ::: "memory")

/* Tiles 0 to 3 hold sums, 4 and 5 weights, 6 and 7 vectors, of `lanes` each. */
static void set_tiles(int lanes)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape.rows[i] = TILE;
        shape.bytes[i] = (uint16_t)(i == 4 || i == 5 ? DEPTH * sizeof(bf16) : lanes * sizeof(float));
    }
    WRITTEN();
    _tile_loadconfig(&shape);
}

/* Vectors as tiles read them. In bfloat16 one vector alone is a panel as it lies. */
typedef struct {
    const bf16 *panels;  /* [panels][columns][lanes], two columns of a lane side by side; or bytes:
                            [panels][columns / 64][2][16][lanes][4], high ones before low ones */
    const float *units;  /* of bytes: [vectors]; NULL = bfloat16 */
    int count, lanes;    /* vectors; of a panel: 16, or 1 if there is one vector */
} Panels;

/* Lanes of the panels that a matrix is multiplied with. */
static int panel_lanes(const Matrix *matrix, int count)
{
    return count == 1 && matrix->format != INT8 ? 1 : TILE;
}

/* What a unit of the integers of each vector of a panel in bfloat16 is worth. What is no number in a
 * vector is none in its scale. */
static __m512 unit_of(const bf16 *panel, int columns)
{
    const __m512i sign = _mm512_set1_epi16(0x7fff);
    __m512i largest = _mm512_setzero_si512();
    for (int column = 0; column < columns; column += 2) {
        __m512i pairs = _mm512_loadu_si512(panel + (size_t)column * TILE);
        largest = _mm512_max_epu16(largest, _mm512_and_si512(pairs, sign));
    }
    __m512i odd = _mm512_slli_epi32(_mm512_srli_epi32(largest, 16), 16);
    largest = _mm512_max_epu32(odd, _mm512_slli_epi32(largest, 16));
    return _mm512_div_ps(_mm512_castsi512_ps(largest), _mm512_set1_ps(32639.0f));
}

/* From `begin` to `end`, counted in 64 columns, of a panel in bfloat16, in bytes. */
static void split_panel(const bf16 *panel, int begin, int end, __m512 unit, int8_t *out)
{
    const __m512i byte = _mm512_set1_epi32(255), round = _mm512_set1_epi32(128);
    const __m512 shift = _mm512_set1_ps(SHIFT);
    __mmask16 is_some = _mm512_cmp_ps_mask(unit, _mm512_set1_ps(FLT_MIN), _CMP_NLT_UQ);
    __m512 inverse = _mm512_maskz_div_ps(is_some, _mm512_set1_ps(1.0f), unit);
    for (int part = begin; part < end; part++) {
        int8_t *to = out + (size_t)part * 2 * TILE * 64;
        for (int i = 0; i < TILE; i++) { /* four columns */
            __m512i high = _mm512_setzero_si512(), low = _mm512_setzero_si512();
            for (int k = 0; k < 4; k++) {
                __m512i pairs = _mm512_loadu_si512(panel + ((size_t)part * 64 + i * 4 + k / 2 * 2) * TILE);
                __m512i wide = k % 2 ? _mm512_slli_epi32(_mm512_srli_epi32(pairs, 16), 16)
                                     : _mm512_slli_epi32(pairs, 16);
                __m512i whole = (__m512i)_mm512_fmadd_ps((__m512)wide, inverse, shift);
                __m512i upper = _mm512_srli_epi32(_mm512_add_epi32(whole, round), 8);
                high = _mm512_or_si512(high, _mm512_slli_epi32(_mm512_and_si512(upper, byte), 8 * k));
                low = _mm512_or_si512(low, _mm512_slli_epi32(_mm512_and_si512(whole, byte), 8 * k));
            }
            _mm512_storeu_si512(to + i * 64, high);
            _mm512_storeu_si512(to + (TILE + i) * 64, low);
        }
    }
}

/* 16 rows of weights, where they are or in `space`, unpacked. Rows behind the last are zero. */
static const char *tile_rows(const Matrix *matrix, int row, bf16 *space)
{
    int columns = matrix->columns, left = matrix->rows - row;
    size_t at = (size_t)row * columns, each = matrix->format == INT8 ? 1 : sizeof(bf16);
    if (left >= TILE && !is_int4(matrix->format))
        return (const char *)matrix->weights + at * each;
    if (left < TILE)
        memset(space, 0, TILE * columns * each);
    int rows = left < TILE ? left : TILE;
    size_t count = (size_t)rows * columns;
    if (!is_int4(matrix->format)) {
        memcpy(space, (const char *)matrix->weights + at * each, count * each);
    } else {
        const uint8_t *weights = (const uint8_t *)matrix->weights + at / 2;
        for (size_t i = 0; i < count; i += GROUP) {
            _mm_prefetch((const char *)weights + i / 2 + BYTES_AHEAD, _MM_HINT_T0);
            __m128i pairs = _mm_loadu_si128((const __m128i *)(weights + i / 2));
            __m128i mask = _mm_set1_epi8(15), low = _mm_and_si128(pairs, mask);
            __m128i high = _mm_and_si128(_mm_srli_epi16(pairs, 4), mask);
            int format = matrix->format, group = (int)((at + i) / GROUP);
            __m512 scale = _mm512_set1_ps(group_float(matrix, format, SCALE, group));
            __m512 zero = format == INT4
                ? _mm512_mul_ps(scale, _mm512_set1_ps(-ZERO))
                : _mm512_set1_ps(group_float(matrix, format, MINIMUM, group));
            __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(low));
            __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(high));
            first = _mm512_fmadd_ps(first, scale, zero), second = _mm512_fmadd_ps(second, scale, zero);
            _mm512_storeu_si512(space + i, (__m512i)_mm512_cvtne2ps_pbh(second, first));
        }
    }
    WRITTEN();
    return (const char *)space;
}

/* Where tiles lie of two panels, or of one with its halves. */
typedef struct {
    const char *one, *other; /* NULL = there is no other */
    size_t step;             /* bytes from a tile to the next */
    int lanes;
} Tiles;

/* Sums of 16 rows, or of 16 rows of either of two matrices, times one panel or two. What is read next
 * lies at `ahead`, or nowhere. */
static inline __attribute__((always_inline)) void tiles_times(
    const char *first, const char *second, int bytes, Tiles x, int is_two, int are_bytes,
    const char *const ahead[2], float *sums)
{
    size_t width = (size_t)x.lanes * sizeof(float);
#define ADD(sum, weights, vectors)                                                                 \
    do {                                                                                           \
        if (are_bytes)                                                                             \
            _tile_dpbssd(sum, weights, vectors);                                                   \
        else                                                                                       \
            _tile_dpbf16ps(sum, weights, vectors);                                                 \
    } while (0)
    _tile_zero(0);
    if (is_two)
        _tile_zero(1);
    if (second != NULL)
        _tile_zero(2);
    if (second != NULL && is_two)
        _tile_zero(3);
    for (int at = 0, tile = 0; at < bytes; at += 64, tile++) {
        for (int half = 0; half < 2; half++)
            if (ahead[half] != NULL)
                for (int i = 0; i < TILE; i++)
                    _mm_prefetch(ahead[half] + ((size_t)tile * TILE + i) * 64, _MM_HINT_T0);
        _tile_loadd(6, x.one + tile * x.step, width);
        _tile_loadd(4, first + at, bytes);
        ADD(0, 4, 6);
        if (is_two) {
            _tile_loadd(7, x.other + tile * x.step, width);
            ADD(1, 4, 7);
        }
        if (second != NULL) {
            _tile_loadd(5, second + at, bytes);
            ADD(2, 5, 6);
            if (is_two)
                ADD(3, 5, 7);
        }
    }
#undef ADD
    _tile_stored(0, sums, width);
    if (is_two)
        _tile_stored(1, sums + TILE * TILE, width);
    if (second != NULL)
        _tile_stored(2, sums + 2 * TILE * TILE, width);
    if (second != NULL && is_two)
        _tile_stored(3, sums + 3 * TILE * TILE, width);
}

/* The sums of 16 rows of INT8 by 16 vectors in halves, in one and scaled. */
static void join_halves(const Matrix *matrix, int row, const float *units, int held, float *sums)
{
    __m512 unit = _mm512_maskz_loadu_ps((__mmask16)((1u << held) - 1), units);
    for (int i = 0; i < TILE; i++) {
        __m512 high = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + i * TILE));
        __m512 low = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + (TILE + i) * TILE));
        __m512 scale = _mm512_set1_ps(row + i < matrix->rows ? matrix->scales[row + i] : 0.0f);
        __m512 both = _mm512_mul_ps(_mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), low), scale);
        AS_IT_IS(both);
        both = _mm512_mul_ps(both, unit);
        AS_IT_IS(both);
        _mm512_storeu_ps(sums + i * TILE, both);
    }
}

/* Where sums go. */
typedef struct {
    float *base;           /* of lane n at base + active[n] * stride; NULL where `inner` is set */
    size_t stride;
    const int32_t *active;
    int adds;              /* to what is there */
    bf16 *inner;           /* [panels][rows][lanes]: SiLU of the first matrix times the second */
} Sink;

/* The sums of 16 rows by as many lanes, with a bias. */
static inline void complete(const Matrix *matrix, int row, int lanes, float *sums)
{
    int rows = matrix->rows - row < TILE ? matrix->rows - row : TILE;
    if (matrix->bias != NULL)
        for (int i = 0; i < rows; i++)
            for (int n = 0; n < lanes; n++)
                sums[i * lanes + n] += matrix->bias[row + i];
}

/* 16 rows of up to 16 vectors, from `n` on, to their places. */
static inline void place_sums(
    const Sink *sink, const Matrix *matrix, int row, int lanes, int n, int held, float *sums)
{
    complete(matrix, row, lanes, sums);
    int rows = matrix->rows - row < TILE ? matrix->rows - row : TILE;
    __mmask16 mask = (__mmask16)((1u << rows) - 1);
    __m512 turned[TILE];
    for (int i = 0; i < (lanes == 1 ? 1 : TILE); i++)
        turned[i] = _mm512_loadu_ps(sums + i * TILE);
    if (lanes > 1)
        transpose(turned);
    for (int i = 0; i < held; i++) {
        float *to = sink->base + (size_t)sink->active[n + i] * sink->stride + row;
        if (sink->adds)
            turned[i] = _mm512_add_ps(turned[i], _mm512_maskz_loadu_ps(mask, to));
        _mm512_mask_storeu_ps(to, mask, turned[i]);
    }
}

/* 16 rows of the MLP's inner values of a panel. */
static inline void gate_sums(
    const Sink *sink, const Matrix *gate, const Matrix *up, int row, int lanes, int n,
    float *gates, float *ups)
{
    complete(gate, row, lanes, gates);
    complete(up, row, lanes, ups);
    for (int i = 0; i < TILE * lanes; i++)
        gates[i] = silu(gates[i]) * ups[i];
    bf16 *to = sink->inner + (size_t)n * gate->rows + (size_t)row * lanes;
    if (lanes == 1) {
        _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(gates)));
        return;
    }
    uint16_t order[2 * TILE];
    for (int i = 0; i < TILE; i++)
        order[2 * i] = (uint16_t)i, order[2 * i + 1] = (uint16_t)(TILE + i);
    __m512i pairs = _mm512_loadu_si512(order);
    for (int i = 0; i < TILE; i += 2) {
        __m512 even = _mm512_loadu_ps(gates + i * TILE), odd = _mm512_loadu_ps(gates + (i + 1) * TILE);
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
        _mm512_storeu_si512(to + i * TILE, _mm512_permutexvar_epi16(pairs, both));
    }
}

static inline const char *next_rows(const Matrix *matrix, int row, int end)
{
    if (is_int4(matrix->format) || row + TILE > end || row + TILE > matrix->rows)
        return NULL;
    size_t each = matrix->format == INT8 ? 1 : sizeof(bf16);
    return (const char *)matrix->weights + (size_t)row * matrix->columns * each;
}

/* Rows from `begin` to `end` of a matrix, or of two of the same shape that are gated. */
static void multiply_by_tiles(
    const Matrix *matrix, const Matrix *up, const Panels *x, int begin, int end, const Sink *sink,
    void *memory)
{
    int columns = matrix->columns, lanes = x->lanes, step = up == NULL ? 2 * TILE : TILE;
    float *sums = memory;
    bf16 *space = (bf16 *)(sums + 4 * TILE * TILE);
    int are_bytes = x->units != NULL, bytes = columns * (are_bytes ? 1 : (int)sizeof(bf16));
    set_tiles(lanes);
    for (int row = begin; row < end; row += step) {
        const Matrix *other = up == NULL ? matrix : up;
        int other_row = up == NULL ? row + TILE : row;
        const char *first = tile_rows(matrix, row, space), *second = NULL;
        if (other_row < end)
            second = tile_rows(other, other_row, space + (size_t)TILE * columns);
        const char *next[2] = {next_rows(matrix, row + step, end),
                               next_rows(other, other_row + step, end)};
        static const char *const nothing[2];
        for (int n = 0; n < x->count; n += are_bytes ? TILE : 2 * TILE) {
            const char *panel = (const char *)(x->panels + (size_t)n * columns);
            const char *const *ahead = n == 0 ? next : nothing;
            int two_panels = !are_bytes && n + TILE < x->count;
            size_t tile = TILE * (size_t)lanes * sizeof(float);
            Tiles tiles = are_bytes ? (Tiles){panel, panel + tile, 2 * tile, lanes}
                                    : (Tiles){panel, panel + bytes / 64 * tile, tile, lanes};
            if (are_bytes && second != NULL)
                tiles_times(first, second, bytes, tiles, 1, 1, ahead, sums);
            else if (are_bytes)
                tiles_times(first, NULL, bytes, tiles, 1, 1, ahead, sums);
            else if (second != NULL && two_panels)
                tiles_times(first, second, bytes, tiles, 1, 0, ahead, sums);
            else if (second != NULL)
                tiles_times(first, second, bytes, tiles, 0, 0, ahead, sums);
            else if (two_panels)
                tiles_times(first, NULL, bytes, tiles, 1, 0, ahead, sums);
            else
                tiles_times(first, NULL, bytes, tiles, 0, 0, ahead, sums);
            for (int j = 0; j <= two_panels; j++) {
                int at = n + j * TILE, held = x->count - at < TILE ? x->count - at : TILE;
                float *here = sums + j * TILE * TILE, *there = here + 2 * TILE * TILE;
                if (are_bytes) {
                    join_halves(matrix, row, x->units + at, held, here);
                    if (second != NULL)
                        join_halves(other, other_row, x->units + at, held, there);
                }
                if (up != NULL) {
                    gate_sums(sink, matrix, up, row, lanes, at, here, there);
                    continue;
                }
                place_sums(sink, matrix, row, lanes, at, held, here);
                if (second != NULL)
                    place_sums(sink, matrix, other_row, lanes, at, held, there);
            }
        }
    }
    _tile_release();
}
#endif

#endif
