/* What is around the library: functions of MXNet and Python, mutexes shared with Python, and arrays that are waited for. */
#include "external.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

EXPORT External gp_external;

EXPORT void gp_make_mutex(pthread_mutex_t *memory)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(memory, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

/* Returns 0 when the mutex is held, or another number if it is not after a moment, in which Python looks for Ctrl-C. */
EXPORT int64_t gp_lock(pthread_mutex_t *mutex)
{
    struct timespec limit = timespec_of(now(CLOCK_REALTIME) + SECOND / 10);
    return pthread_mutex_timedlock(mutex, &limit);
}

EXPORT void gp_unlock(pthread_mutex_t *mutex)
{
    pthread_mutex_unlock(mutex);
}

/* Note that the array is ready, or has failed. Called by the engine. */
static void note_arrival(void *run_context, const OnComplete *on_complete, Arrival *arrival)
{
    (void)run_context;
    if (arrival->value && *arrival->value > 0)
        gp_external.arrived_above_zero(arrival);
    arrival->arrived = 1;
    syscall(SYS_futex, &arrival->arrived, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
    complete(on_complete, 0);
}

/* Have the engine note when what is queued for the array by now has written it. Called by Python; returns as MXNet does. */
EXPORT int gp_expect(Arrival *arrival)
{
    static const int on_cpu[2] = {1, 0}, although_failed = 7; /* a `mxnet::Context`, and an FnProperty */
    arrival->arrived = 0;
    int status = gp_external.MXEnginePushAsyncND((void *)note_arrival, arrival, 0, on_cpu, &arrival->array, 1, 0, 0,
                                                 &although_failed, 1 << 20, "arrives", 0);
    if (status)
        arrival->arrived = 1;
    return status;
}

/* Wait for that, at most so many nanoseconds; returns whether it has been noted. Called by Python, in any thread. */
EXPORT int64_t gp_await(Arrival *arrival, int64_t limit)
{
    int64_t end = now(CLOCK_MONOTONIC) + limit;
    for (int64_t left = limit; !arrival->arrived && left > 0; left = end - now(CLOCK_MONOTONIC)) {
        struct timespec time = timespec_of(left);
        syscall(SYS_futex, &arrival->arrived, FUTEX_WAIT, 0, &time, 0, 0);
    }
    return arrival->arrived;
}
