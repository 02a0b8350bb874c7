/* See `arrival.h`. */
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "arrival.h"
#include "clock.h"
#include "external.h"

EXPORT void gp_arrive(void *run_context, const OnComplete *on_complete, _Atomic int32_t *arrived)
{
    (void)run_context;
    *arrived = 1;
    syscall(SYS_futex, arrived, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
    complete(on_complete, 0);
}

EXPORT int64_t gp_await(_Atomic int32_t *arrived, int64_t limit)
{
    int64_t end = now(CLOCK_MONOTONIC) + limit;
    for (int64_t left = limit; !*arrived && left > 0; left = end - now(CLOCK_MONOTONIC)) {
        struct timespec time = timespec_of(left);
        syscall(SYS_futex, arrived, FUTEX_WAIT, 0, &time, 0, 0);
    }
    return *arrived;
}
