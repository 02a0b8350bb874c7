/* Sums of arrays [per processor]. `out` may be the first of the sources, but shares no memory with another one. */
#include "sums.h"

#include <string.h>

#include "processor.h"

#define BLOCK 8192 /* values that stay in the cache while all arrays are added to them */

#define VALUE float
#define TYPED(name) name##_float32
#include "sums_of_type.h"
#undef VALUE
#undef TYPED

#define VALUE double
#define TYPED(name) name##_float64
#include "sums_of_type.h"
#undef VALUE
#undef TYPED

#define VALUE uint32_t /* int32, whose overflow wraps around */
#define TYPED(name) name##_int32
#include "sums_of_type.h"

/* Conversions between float32 and its halves, float16 and bfloat16; without branches, for vector instructions. */

typedef union Bits {
    uint32_t bits;
    float value;
} Bits;

enum { EXPONENT = 23, SIGN = 16 }; /* bits below them: of float32's exponent, and between the signs */

static float of_float16(uint16_t half)
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
static uint16_t to_float16(float value)
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

static float of_bfloat16(uint16_t half)
{
    Bits x = {(uint32_t)half << 16};
    return x.value;
}

static uint16_t to_bfloat16(float value)
{
    Bits x = {.value = value};
    uint32_t rounded = (x.bits + (x.bits >> 16 & 1) + 0x7fff) >> 16;
    return (uint16_t)((x.bits & 0x7fffffff) > 255u << EXPONENT ? 0x7fc0 : rounded);
}

static void widen(int64_t dtype, const uint16_t *halves, int64_t size, float *out)
{
    if (dtype == FLOAT16)
        for (int64_t i = 0; i < size; i++)
            out[i] = of_float16(halves[i]);
    else
        for (int64_t i = 0; i < size; i++)
            out[i] = of_bfloat16(halves[i]);
}

static void narrow(int64_t dtype, const float *values, int64_t size, uint16_t *out)
{
    if (dtype == FLOAT16)
        for (int64_t i = 0; i < size; i++)
            out[i] = to_float16(values[i]);
    else
        for (int64_t i = 0; i < size; i++)
            out[i] = to_bfloat16(values[i]);
}

/* Sums with halves, `from` which or `to` which the values go. */
static void sum_halves(int64_t from, int64_t to, char *const *sources, int64_t offset, int64_t num, char *out,
                       int64_t first_value, int64_t last_value)
{
    float total[BLOCK], other[BLOCK];
    uint16_t rounded[BLOCK];
    for (int64_t begin = first_value; begin < last_value; begin += BLOCK) {
        int64_t size = last_value - begin < BLOCK ? last_value - begin : BLOCK;
        for (int64_t n = 0; n < num; n++) {
            const char *source = sources[n] + offset + begin * size_of(from);
            const float *values = from == FLOAT32 ? (const float *)source : n ? other : total;
            if (from != FLOAT32)
                widen(from, (const uint16_t *)source, size, n ? other : total);
            else if (!n)
                memcpy(total, source, (size_t)size * sizeof *total);
            for (int64_t i = 0; n && i < size; i++)
                total[i] += values[i];
        }
        if (to != FLOAT32) {
            narrow(to, total, size, (uint16_t *)out + begin);
            continue;
        }
        if (num > 1) {
            narrow(from, total, size, rounded);
            widen(from, rounded, size, total);
        }
        memcpy((float *)out + begin, total, (size_t)size * sizeof *total);
    }
}

void PER_PROCESSOR(sum_arrays)(int64_t from, int64_t to, char *const *sources, int64_t offset, int64_t num, char *out,
                               int64_t begin, int64_t end)
{
    if (from >= FLOAT16 || to >= FLOAT16)
        sum_halves(from, to, sources, offset, num, out, begin, end);
    else
        (from == FLOAT32 ? sum_float32 : from == FLOAT64 ? sum_float64 : sum_int32)(sources, offset, num, out, begin, end);
}
