/* Steps of `Arithmetic` on the memory of CPU devices: of `kernels.c` and `elementwise.c`, for each processor. */
#ifndef KERNELS_H
#define KERNELS_H

#include "processor.h"
#include "sync_batch_norm.h"

#define STEPS_OF(version)                                                                                              \
    void measure_##version(State *), sums_##version(State *), take_batch_##version(State *),                           \
        take_running_##version(State *), normalise_##version(State *), gradient_##version(State *);

STEPS_OF(float_baseline)
STEPS_OF(double_baseline)
#if defined(__x86_64__)
STEPS_OF(float_avx2)
STEPS_OF(double_avx2)
STEPS_OF(float_avx512)
STEPS_OF(double_avx512)
#endif

#endif
