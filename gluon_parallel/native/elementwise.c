/* SyncBatchNorm's steps that compute each value by itself [per processor].

   Sums keep their order here: (x - high) - low must stay what it says. */
#include <string.h>

#include "kernels.h"

#define REAL float
#define TYPED(name) name##_float
#include "elementwise_of_type.h"
#undef REAL
#undef TYPED

#define REAL double
#define TYPED(name) name##_double
#include "elementwise_of_type.h"

const Elementwise PER_PROCESSOR(elementwise_float) = {take_batch_float, take_running_float, normalise_float, gradient_float};
const Elementwise PER_PROCESSOR(elementwise_double) = {take_batch_double, take_running_double, normalise_double,
                                                       gradient_double};
