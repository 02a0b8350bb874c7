/* Sums of arrays [per processor]. `out` may be the first of the sources, but shares no memory with another one. */
#include "sums.h"

#include <string.h>

#include "halves.h"
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

/* The same with halves, `from` which or `to` which the values go. */
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
