/* Conversions between float32 and its halves, float16 and bfloat16; without branches, for vector instructions. */
#ifndef HALVES_H
#define HALVES_H

#include <stdint.h>

#include "sums.h"

typedef union Bits {
    uint32_t bits;
    float value;
} Bits;

enum { EXPONENT = 23, SIGN = 16 }; /* bits below them: of float32's exponent, and between the signs */

static inline float of_float16(uint16_t half)
{
    uint32_t exponent = half & 0x7c00;
    Bits x = {((uint32_t)(half & 0x7fff) << 13) + ((127 - 15) << EXPONENT)};
    Bits infinite = {x.bits + ((128 - 16) << EXPONENT)}; /* or NaN */
    Bits small = {x.bits + (1 << EXPONENT)}, least = {(127 - 14) << EXPONENT};
    small.value -= least.value; /* zero or subnormal */
    Bits found = {exponent == 0x7c00 ? infinite.bits : exponent ? x.bits : small.bits};
    found.bits |= (uint32_t)(half & 0x8000) << SIGN;
    return found.value;
}

/* Rounded to the nearest, of two to the even one; what is too large becomes infinite. */
static inline uint16_t to_float16(float value)
{
    Bits x = {.value = value};
    uint32_t sign = x.bits & 0x80000000;
    x.bits ^= sign;
    Bits small = x, magic = {(127 - 15 + 23 - 10 + 1) << EXPONENT};
    small.value += magic.value; /* which rounds */
    uint32_t normal = (x.bits - ((127 - 15) << EXPONENT) + 0xfff + (x.bits >> 13 & 1)) >> 13;
    uint32_t large = x.bits > 255u << EXPONENT ? 0x7e00 : 0x7c00; /* NaN or infinite */
    uint32_t found = x.bits >= (127u + 16) << EXPONENT ? large
                     : x.bits < 113u << EXPONENT       ? small.bits - magic.bits
                                                       : normal;
    return (uint16_t)(found | sign >> SIGN);
}

static inline float of_bfloat16(uint16_t half)
{
    Bits x = {(uint32_t)half << 16};
    return x.value;
}

static inline uint16_t to_bfloat16(float value)
{
    Bits x = {.value = value};
    uint32_t rounded = (x.bits + (x.bits >> 16 & 1) + 0x7fff) >> 16;
    return (uint16_t)((x.bits & 0x7fffffff) > 255u << EXPONENT ? 0x7fc0 : rounded);
}

static inline void widen(int64_t dtype, const uint16_t *halves, int64_t size, float *out)
{
    if (dtype == FLOAT16)
        for (int64_t i = 0; i < size; i++)
            out[i] = of_float16(halves[i]);
    else
        for (int64_t i = 0; i < size; i++)
            out[i] = of_bfloat16(halves[i]);
}

static inline void narrow(int64_t dtype, const float *values, int64_t size, uint16_t *out)
{
    if (dtype == FLOAT16)
        for (int64_t i = 0; i < size; i++)
            out[i] = to_float16(values[i]);
    else
        for (int64_t i = 0; i < size; i++)
            out[i] = to_bfloat16(values[i]);
}

#endif
