/* See `arrival.h`. */
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "arrival.h"
#include "clock.h"
#include "external.h"

EXPORT void gp_arrive(void *run_context, const OnComplete *on_complete, Arrival *arrival)
{
    (void)run_context;
    if (arrival->value && *arrival->value > 0)
        gp_external.arrived_above_zero(arrival);
    arrival->arrived = 1;
    syscall(SYS_futex, &arrival->arrived, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
    complete(on_complete, 0);
}

EXPORT int64_t gp_await(Arrival *arrival, int64_t limit)
{
    int64_t end = now(CLOCK_MONOTONIC) + limit;
    for (int64_t left = limit; !arrival->arrived && left > 0; left = end - now(CLOCK_MONOTONIC)) {
        struct timespec time = timespec_of(left);
        syscall(SYS_futex, &arrival->arrived, FUTEX_WAIT, 0, &time, 0, 0);
    }
    return arrival->arrived;
}
