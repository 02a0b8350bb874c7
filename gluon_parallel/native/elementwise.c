/* SyncBatchNorm's steps that compute each value by itself [per processor].

   Sums keep their order here: (x - high) - low must stay what it says. */
#include <string.h>

#include "kernels.h"

/* A function that exists twice: where `adds` is known, its loops are of vector instructions. */
#define INLINE static inline __attribute__((always_inline))

#define REAL float
#define TYPED(name) PER_PROCESSOR(name##_float)
#include "elementwise_of_type.h"
#undef REAL
#undef TYPED

#define REAL double
#define TYPED(name) PER_PROCESSOR(name##_double)
#include "elementwise_of_type.h"
