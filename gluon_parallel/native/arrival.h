/* Waiting, with a limit, until MXNet's engine has made an array ready. */
#ifndef ARRIVAL_H
#define ARRIVAL_H

#include <stdint.h>

#include "engine.h"

/* An array that is waited for. The record, and the array's memory, are Python's. */
typedef struct Arrival {
    _Atomic int32_t arrived; /* whether the array is ready, or has failed */
    const double *value;     /* NULL, or one of the array's: Python is told first where it is above 0 */
} Arrival;

/* Note that the array is ready, or has failed. Called by the engine. */
void gp_arrive(void *run_context, const OnComplete *on_complete, Arrival *arrival);

/* Wait for that, at most so many nanoseconds; returns whether it has been noted. Called by Python, in any thread. */
int64_t gp_await(Arrival *arrival, int64_t limit);

#endif
