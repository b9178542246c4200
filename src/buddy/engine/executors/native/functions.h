/* Functions of single numbers, in forms that compilers turn into vector code. */

#ifndef BUDDY_FUNCTIONS_H
#define BUDDY_FUNCTIONS_H

#include <math.h>
#include <stdint.h>

/* e^x for x <= 0 within 2 ulp, in a form that compilers turn into vector code. */
static inline float exp_of(float x)
{
    x = x < -87.0f ? -87.0f : x;
    float whole = floorf(x * 1.44269504f + 0.5f);
    float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    float power = whole == whole ? whole : 0.0f; /* NaN is no whole number; `p` keeps it */
    union { int32_t bits; float value; } u = {((int32_t)power + 127) << 23};
    return p * u.value;
}

static inline float silu(float x)
{
    float e = exp_of(x < 0 ? x : -x); /* e^-|x| */
    return x * (x < 0 ? e : 1.0f) / (1.0f + e);
}

#endif
