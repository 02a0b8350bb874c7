/* Waiting, with a limit, until MXNet's engine has made an array ready. */
#ifndef ARRIVAL_H
#define ARRIVAL_H

#include <stdint.h>

#include "engine.h"

/* Note that the array is ready, or has failed. Called by the engine; `arrived` is in memory of Python's, and was 0. */
void gp_arrive(void *run_context, const OnComplete *on_complete, _Atomic int32_t *arrived);

/* Wait for that, at most so many nanoseconds; returns whether it has been noted. Called by Python, in any thread. */
int64_t gp_await(_Atomic int32_t *arrived, int64_t limit);

#endif
