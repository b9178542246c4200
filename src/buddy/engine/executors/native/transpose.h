/* A square of floats, as many as a register holds either way, turned over. */

#ifndef BUDDY_TRANSPOSE_H
#define BUDDY_TRANSPOSE_H

#include "matrix.h"

#if defined(__AVX512F__)
#define PAIR(kind, a, b)                                                                           \
    _mm512_castpd_ps(_mm512_unpack##kind##_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)))
static inline void transpose(void *square)
{
    __m512 *rows = square, t[WIDTH];
    for (int i = 0; i < WIDTH; i += 2) {
        t[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < WIDTH; i += 4) {
        rows[i] = PAIR(lo, t[i], t[i + 2]);
        rows[i + 1] = PAIR(hi, t[i], t[i + 2]);
        rows[i + 2] = PAIR(lo, t[i + 1], t[i + 3]);
        rows[i + 3] = PAIR(hi, t[i + 1], t[i + 3]);
    }
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
#undef PAIR
#elif defined(__AVX2__)
static inline void transpose(void *square)
{
    __m256 *rows = square, t[WIDTH];
    for (int i = 0; i < WIDTH; i += 2) {
        t[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < WIDTH; i += 4) {
        rows[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        rows[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        rows[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        rows[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(rows[i], rows[4 + i], 0x20);
        t[4 + i] = _mm256_permute2f128_ps(rows[i], rows[4 + i], 0x31);
    }
    memcpy(rows, t, sizeof t);
}
#else
static inline void transpose(void *square)
{
    float from[WIDTH][WIDTH], to[WIDTH][WIDTH];
    memcpy(from, square, sizeof from);
    for (int i = 0; i < WIDTH; i++)
        for (int j = 0; j < WIDTH; j++)
            to[j][i] = from[i][j];
    memcpy(square, to, sizeof to);
}
#endif

#endif
