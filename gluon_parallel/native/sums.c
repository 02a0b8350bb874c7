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

void PER_PROCESSOR(sum_arrays)(int64_t dtype, char *const *sources, int64_t offset, int64_t num, char *out,
                               int64_t begin, int64_t end)
{
    (dtype == FLOAT32 ? sum_float32 : dtype == FLOAT64 ? sum_float64 : sum_int32)(sources, offset, num, out, begin, end);
}
