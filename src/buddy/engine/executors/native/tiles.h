/* Rows of bfloat16 weights times up to MOST_LANES vectors, by the tile registers of AMX.
 *
 * One instruction multiplies 16 rows of weights, 32 columns deep, with 16 vectors. Weights are read
 * where they lie. The vectors are packed into panels first: of two columns each, those of 16 vectors
 * side by side. A product's sum has one order whatever else is multiplied, so a sequence's numbers do
 * not depend on those beside it.
 */

#ifndef BUDDY_TILES_H
#define BUDDY_TILES_H

#include "matrix.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

#define TILE 16  /* rows of weights, and vectors, of a tile */
#define DEPTH 32 /* columns of weights of a tile */

/* Bytes that a product of so many vectors works in. */
static size_t tile_bytes(int columns, int count)
{
    size_t panels = (count + TILE - 1) / TILE;
    return panels * TILE * columns * sizeof(bf16) + 4 * TILE * TILE * sizeof(float);
}

#if HAS_TILES
/* Whether the kernel of the system lets this process use the registers; it must be asked once. */
static int may_use_tiles(void)
{
    enum { ASK_FOR_STATE = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
}

/* The matrix whose rows are the columns of the one that is given. */
static inline void transpose(__m512 *rows)
{
    __m512 t[TILE];
    for (int i = 0; i < TILE; i += 2) {
        t[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
#define PAIR(kind, a, b)                                                                           \
    _mm512_castpd_ps(_mm512_unpack##kind##_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)))
    for (int i = 0; i < TILE; i += 4) {
        rows[i] = PAIR(lo, t[i], t[i + 2]);
        rows[i + 1] = PAIR(hi, t[i], t[i + 2]);
        rows[i + 2] = PAIR(lo, t[i + 1], t[i + 3]);
        rows[i + 3] = PAIR(hi, t[i + 1], t[i + 3]);
    }
#undef PAIR
    for (int i = 0; i < 4; i++) {
        __m512 a = _mm512_shuffle_f32x4(rows[i], rows[4 + i], 0x88);
        __m512 b = _mm512_shuffle_f32x4(rows[8 + i], rows[12 + i], 0x88);
        __m512 c = _mm512_shuffle_f32x4(rows[i], rows[4 + i], 0xdd);
        __m512 d = _mm512_shuffle_f32x4(rows[8 + i], rows[12 + i], 0xdd);
        t[i] = _mm512_shuffle_f32x4(a, b, 0x88);
        t[4 + i] = _mm512_shuffle_f32x4(c, d, 0x88);
        t[8 + i] = _mm512_shuffle_f32x4(a, b, 0xdd);
        t[12 + i] = _mm512_shuffle_f32x4(c, d, 0xdd);
    }
    memcpy(rows, t, sizeof t);
}

/* A panel of up to 16 vectors; what is missing is zero. */
static void pack_panel(const Vector *x, int count, int columns, bf16 *panel)
{
    for (int column = 0; column < columns; column += DEPTH) {
        __m512 pairs[TILE];
        for (int n = 0; n < TILE; n++)
            pairs[n] = n < count ? _mm512_loadu_ps(x[n].narrow + column) : _mm512_setzero_ps();
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

/* The sums of a tile to their places: 16 rows of each vector. */
static inline void place_sums(const float *sums, int lanes, int count, int row, float *const *y)
{
    if (lanes == 1) {
        memcpy(y[0] + row, sums, TILE * sizeof(float));
        return;
    }
    __m512 rows[TILE];
    for (int i = 0; i < TILE; i++)
        rows[i] = _mm512_loadu_ps(sums + i * TILE);
    transpose(rows);
    for (int n = 0; n < count; n++)
        _mm512_storeu_ps(y[n] + row, rows[n]);
}

/* 16 or 32 rows of weights times one panel or two. */
static inline __attribute__((always_inline)) void tiles_times(
    const bf16 *weights, int columns, int two_rows, const bf16 *panel, int lanes, int two_panels,
    const char *next, float *sums)
{
    size_t stride = (size_t)columns * sizeof(bf16), width = (size_t)lanes * sizeof(float);
    const bf16 *second = panel + (size_t)columns * lanes;
    _tile_zero(0);
    if (two_panels)
        _tile_zero(1);
    if (two_rows)
        _tile_zero(2);
    if (two_rows && two_panels)
        _tile_zero(3);
    for (int column = 0; column < columns; column += DEPTH) {
        if (next != NULL) /* what is read after these rows lies behind them */
            for (int i = 0; i < (two_rows + 1) * TILE; i++)
                _mm_prefetch(next + (size_t)(column / DEPTH) * (two_rows+1) * TILE * 64 + i * 64, _MM_HINT_T0);
        _tile_loadd(6, panel + (size_t)column * lanes, width);
        _tile_loadd(4, weights + column, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (two_panels) {
            _tile_loadd(7, second + (size_t)column * lanes, width);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (two_rows) {
            _tile_loadd(5, weights + (size_t)TILE * columns + column, stride);
            _tile_dpbf16ps(2, 5, 6);
            if (two_panels)
                _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, width);
    if (two_panels)
        _tile_stored(1, sums + TILE * TILE, width);
    if (two_rows)
        _tile_stored(2, sums + 2 * TILE * TILE, width);
    if (two_rows && two_panels)
        _tile_stored(3, sums + 3 * TILE * TILE, width);
}

/* y[n][row] = matrix[row] . x[n]; returns the first row that is left: fewer than 16 are. */
static int rows_by_tiles(
    const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y,
    void *memory)
{
    int columns = matrix->columns, lanes = count == 1 ? 1 : TILE, row = begin;
    const bf16 *weights = matrix->weights, *panels = x[0].narrow;
    float *sums = memory;
    if (count > 1) {
        bf16 *packed = (bf16 *)(sums + 4 * TILE * TILE);
        for (int n = 0; n < count; n += TILE)
            pack_panel(x + n, count - n, columns, packed + (size_t)n * columns);
        panels = packed;
    }
    set_tiles(lanes);
    while (row + TILE <= end) {
        int two_rows = count > 1 && row + 2 * TILE <= end;
        const bf16 *here = weights + (size_t)row * columns;
        const char *next = NULL; /* rows of this share alone */
        if (row + 4 * TILE <= end)
            next = (const char *)(here + (size_t)(two_rows ? 2 : 1) * TILE * columns);
        for (int n = 0; n < count; n += 2 * TILE) {
            const bf16 *panel = panels + (size_t)n * columns;
            int two_panels = n + TILE < count;
            const char *ahead = n == 0 ? next : NULL;
            if (two_rows && two_panels)
                tiles_times(here, columns, 1, panel, TILE, 1, ahead, sums);
            else if (two_rows)
                tiles_times(here, columns, 1, panel, lanes, 0, ahead, sums);
            else if (two_panels)
                tiles_times(here, columns, 0, panel, TILE, 1, ahead, sums);
            else
                tiles_times(here, columns, 0, panel, lanes, 0, ahead, sums);
            for (int i = 0; i < 2; i++)
                for (int j = 0; j < 2; j++) {
                    int first = n + j * TILE, held = count - first;
                    if ((i == 0 || two_rows) && held > 0)
                        place_sums(sums + (2 * i + j) * TILE * TILE, lanes,
                                   held < TILE ? held : TILE, row + i * TILE, y + first);
                }
        }
        row += two_rows ? 2 * TILE : TILE;
    }
    _tile_release();
    return row;
}
#endif

#endif
