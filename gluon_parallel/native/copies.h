/* Copies of the same arrays on the devices of this process: their sums, and the marks of their gradients. */
#ifndef COPIES_H
#define COPIES_H

#include <stdint.h>

#include "engine.h"

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
    void **handles; /* of NDArrays, and after them that of an array of one double for the result */
    int64_t *num_values;
    int64_t *dtypes; /* FLOAT32 or FLOAT64 */
    _Atomic int64_t has_ended; /* then the record and the arrays are used no longer */
} FiniteLook;

/* Have MXNet's engine sum the lists, the first ones earlier than the others; does not wait. Returns 0, or another number
   if MXNet has refused one; the error is MXNet's. */
int64_t gp_push_sums(const CopySums *sums, int64_t priority);

/* Write to `marks`, `num` bytes, whether the gradient of each array is fresh; returns the number of fresh ones. */
int64_t gp_get_marks(void **handles, int64_t num, int8_t *marks);

/* Mark the gradients of these arrays as fresh, or as not. */
void gp_set_marks(void **handles, int64_t num, int64_t mark);

/* Write 1 to the result if no value of the arrays is NaN or infinite, else 0. Called by the engine. */
void gp_find_finite(void *run_context, const OnComplete *on_complete, FiniteLook *look);

#endif
