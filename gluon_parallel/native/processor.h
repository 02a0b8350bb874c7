/* Versions of the same functions for several processors, and the choice among them.

   A file whose first line says "[per processor]" is compiled once for each version, with PROCESSOR defined as its name. */
#ifndef PROCESSOR_H
#define PROCESSOR_H

#include <stdint.h>

enum { BASELINE, AVX2, AVX512, NUM_PROCESSORS };

#define JOINED(name, processor) name##_##processor
#define EXPANDED(name, processor) JOINED(name, processor)
#define PER_PROCESSOR(name) EXPANDED(name, PROCESSOR)

/* The best version for this machine, or the one that GLUON_PARALLEL_PROCESSOR names; -1 if this machine has no such. */
int64_t gp_processor(void);

/* The best version for this machine. */
int64_t gp_best_processor(void);

/* The hash of the files that the library was built from; more words follow if it was built to be debugged. */
const char *gluon_parallel_sources(void);

#endif
