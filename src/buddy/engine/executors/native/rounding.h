/* A vector in whole numbers. */

#ifndef BUDDY_ROUNDING_H
#define BUDDY_ROUNDING_H

#include <float.h>

#include "matrix.h"

#define SHIFT 12582912.0f /* 1.5 times 2^23: the last bits of what is added to it are the whole number */

/* Round to the nearest, so that the largest number becomes `most`; what one is worth. What is no number
 * in a vector is none in that. */
static inline __attribute__((always_inline)) float round_to(
    const float *restrict x, int columns, int most, int16_t *restrict out)
{
    int32_t largest = 0;
    for (int i = 0; i < columns; i++) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float unit;
    memcpy(&unit, &largest, sizeof unit);
    unit /= (float)most;
    float inverse = unit < FLT_MIN ? 0.0f : 1.0f / unit;
    for (int i = 0; i < columns; i++) {
#if defined(__FMA__) || defined(__aarch64__)
        float shifted = __builtin_fmaf(x[i], inverse, SHIFT); /* whatever compilers fuse, as in tiles.h */
#else
        float shifted = x[i] * inverse + SHIFT;
#endif
        uint32_t bits;
        memcpy(&bits, &shifted, sizeof bits);
        out[i] = (int16_t)(bits & 0xffff);
    }
    return unit;
}

static __attribute__((noinline)) float round_vector(const float *x, int columns, int most, int16_t *out)
{
    return round_to(x, columns, most, out);
}

#endif
