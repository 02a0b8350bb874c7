/* Copies of the same arrays on the devices of this process: their sums. */
#ifndef COPIES_H
#define COPIES_H

#include <stdint.h>

#include "external.h"

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

/* Arrays on CPUs in which `gp_find_finite` looks for NaN and infinity. */
typedef struct FiniteLook {
    int64_t num;
    void **handles; /* of NDArrays */
    int64_t *num_values;
    int64_t *dtypes; /* FLOAT32 or FLOAT64 */
    int64_t is_finite; /* the result */
    _Atomic int64_t has_ended; /* then the record and the arrays are used no longer */
} FiniteLook;

#endif
