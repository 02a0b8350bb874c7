/* Copies of the same arrays on the devices of this process: their sums, and the marks of their gradients. */
#ifndef COPIES_H
#define COPIES_H

#include <stdint.h>

/* What `gp_push_sums` sums: lists of arrays on CPUs, of `num_copies` each. */
typedef struct CopySums {
    int64_t num_lists;
    int64_t num_copies;
    void **handles; /* of NDArrays, list by list */
    int64_t *num_values; /* of an array of each list */
    int64_t *dtypes; /* of each list, see `sums.h` */
    int32_t *devices; /* kind and number of the device whose worker sums each list */
    double scale; /* of the sums */
} CopySums;

#endif
