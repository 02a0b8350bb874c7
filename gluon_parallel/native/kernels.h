/* Steps of `Arithmetic` on the memory of CPU devices; `versions.c` puts them together for a processor. */
#ifndef KERNELS_H
#define KERNELS_H

#include "processor.h"
#include "sync_batch_norm.h"

/* Of `kernels.c` */
typedef struct Sums {
    void (*measure)(State *);
    void (*sums)(State *);
} Sums;

/* Of `elementwise.c` */
typedef struct Elementwise {
    void (*take_batch)(State *);
    void (*take_running)(State *);
    void (*normalise)(State *);
    void (*gradient)(State *);
} Elementwise;

#endif
