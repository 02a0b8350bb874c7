/* Sums and copies of arrays in memory. */
#ifndef SUMS_H
#define SUMS_H

#include <stdint.h>

/* What can be summed in shared memory; Python has the dtypes of these names. */
enum { FLOAT32, FLOAT64, INT32, FLOAT16, BFLOAT16 };

static inline int64_t size_of(int64_t dtype)
{
    return dtype == FLOAT64 ? 8 : dtype < FLOAT16 ? 4 : 2;
}

/* As what values of the dtype are added: halves as float32. */
static inline int64_t wide(int64_t dtype)
{
    return dtype < FLOAT16 ? dtype : FLOAT32;
}

/* The values from `begin` to `end` of the array `out` become the sums of those of `num` others, added in their order.
   Each of the others begins `offset` bytes behind its address.

   The sources are `from` a dtype, and the sum goes `to` the same one, or `from` halves `to` the wide one, or back. Halves
   are added in float32; the sum of several is rounded to a half, also where it becomes float32 again. */
typedef void sum_function(int64_t from, int64_t to, char *const *sources, int64_t offset, int64_t num, char *out,
                          int64_t begin, int64_t end);

extern sum_function sum_arrays_baseline, sum_arrays_avx2, sum_arrays_avx512;
extern sum_function *sum_arrays; /* the version for this processor */

#endif
