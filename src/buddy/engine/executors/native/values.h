/* Sums of values, weighed, for several query heads at once. */

#ifndef BUDDY_VALUES_H
#define BUDDY_VALUES_H

#include "matrix.h"

#define MIXED_TOGETHER 3 /* for which a value is widened once */

static inline __attribute__((always_inline)) void mix_columns(
    const Matrix *values, int format, int at, int parts, const float *const *weights, int together,
    float *const *out)
{
    Floats sums[4 * MIXED_TOGETHER];
    for (int i = 0; i < parts * together; i++)
        sums[i] = (Floats){0};
    size_t row = (size_t)values->columns * bits_of(format) / 8;
    const char *ahead = (const char *)values->weights + at * bits_of(format) / 8 + 4096;
    for (int slot = 0; slot < values->rows; slot++, ahead += row)
        for (int part = 0; part < parts; part++) {
            if (part * WIDTH * bits_of(format) % 512 == 0)
                __builtin_prefetch(ahead + part * WIDTH * bits_of(format) / 8);
            Floats value = widened(values, format, slot, at + part * WIDTH);
            for (int n = 0; n < together; n++)
                sums[n * parts + part] += value * weights[n][slot];
        }
    for (int n = 0; n < together; n++)
        for (int part = 0; part < parts; part++)
            memcpy(out[n] + at + part * WIDTH, &sums[n * parts + part], sizeof *sums);
}

/* The last columns, fewer than WIDTH. */
static void mix_rest(
    const Matrix *values, int format, int at, const float *const *weights, int together,
    float *const *out)
{
    int left = values->columns - at;
    for (int n = 0; n < together; n++) {
        Floats sum = {0};
        for (int slot = 0; slot < values->rows; slot++)
            sum += rest_of_row(values, format, slot, at, left) * weights[n][slot];
        memcpy(out[n] + at, &sum, sizeof(float) * left);
    }
}

static inline __attribute__((always_inline)) void mix_format(
    const Matrix *values, int format, const float *const *weights, int together, float *const *out)
{
    int at = 0, count = values->columns;
    for (; at + 4 * WIDTH <= count; at += 4 * WIDTH)
        mix_columns(values, format, at, 4, weights, together, out);
    for (; at + WIDTH <= count; at += WIDTH)
        mix_columns(values, format, at, 1, weights, together, out);
    if (at < count)
        mix_rest(values, format, at, weights, together, out);
}

static void mix_some(const Matrix *values, const float *const *weights, int together, float *const *out)
{
    int format = values->format;
    if (format == BFLOAT16 && together == MIXED_TOGETHER)
        mix_format(values, BFLOAT16, weights, MIXED_TOGETHER, out);
    else if (format == BFLOAT16)
        mix_format(values, BFLOAT16, weights, 1, out);
    else if (together == MIXED_TOGETHER)
        mix_format(values, FLOAT32, weights, MIXED_TOGETHER, out);
    else
        mix_format(values, FLOAT32, weights, 1, out);
}

/* out[n] = weights[n] . values */
static __attribute__((noinline)) void mix(
    const Matrix *values, const float *const *weights, int heads, float *const *out)
{
    int n = 0;
    for (; n + MIXED_TOGETHER <= heads; n += MIXED_TOGETHER)
        mix_some(values, weights + n, MIXED_TOGETHER, out + n);
    for (; n < heads; n++)
        mix_some(values, weights + n, 1, out + n);
}

#endif
