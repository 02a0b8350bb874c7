/* Versions of the same functions for several processors, and the choice among them.

   A file whose first line says "[per processor]" is compiled once for each version, with PROCESSOR defined as its name; one
   with "[per processor and type]" for each type as well, with REAL defined as float or double. */
#ifndef PROCESSOR_H
#define PROCESSOR_H

#include "sync_batch_norm.h"

enum { BASELINE, AVX2, AVX512, NUM_PROCESSORS };

#define JOINED(name, version) name##_##version
#define EXPANDED(name, version) JOINED(name, version)
#define PER_PROCESSOR(name) EXPANDED(name, PROCESSOR)
#define PER_TYPE(name) EXPANDED(EXPANDED(name, REAL), PROCESSOR)

/* SyncBatchNorm's arithmetic on the memory of CPU devices: of `elementwise.c`, its sums of `kernels.c`. */
#ifdef REAL
void PER_TYPE(measure)(State *), PER_TYPE(sums)(State *);
#endif
extern const Arithmetic arithmetic_float_baseline, arithmetic_float_avx2, arithmetic_float_avx512,
    arithmetic_double_baseline, arithmetic_double_avx2, arithmetic_double_avx512;

#endif
