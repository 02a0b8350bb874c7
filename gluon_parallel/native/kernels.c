/* SyncBatchNorm's sums over values in memory [per processor] [sums in any order].

   Every value is read from memory once: a chunk small enough for the cache is summed, then its squared deviations from
   its own mean; chunks combine like shards do. So no square of a large mean is ever formed, and a channel that is
   constant, with no more digits than float32 has, has m2 == 0 exactly. */
#include "kernels.h"

#include <string.h>

#define CHUNK 4096 /* values that stay in the first-level cache between the two loops over them */

#define REAL float
#define TYPED(name) PER_PROCESSOR(name##_float)
#include "kernels_of_type.h"
#undef REAL
#undef TYPED

#define REAL double
#define TYPED(name) PER_PROCESSOR(name##_double)
#include "kernels_of_type.h"
