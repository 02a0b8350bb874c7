/* Functions of MXNet and of Python, and mutexes that Python and the library hold. */
#include "external.h"

#include "clock.h"

EXPORT External gp_external;

EXPORT void gp_make_mutex(pthread_mutex_t *memory)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(memory, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

EXPORT int64_t gp_lock(pthread_mutex_t *mutex)
{
    struct timespec limit = timespec_of(now(CLOCK_REALTIME) + SECOND / 10);
    return pthread_mutex_timedlock(mutex, &limit);
}

EXPORT void gp_unlock(pthread_mutex_t *mutex)
{
    pthread_mutex_unlock(mutex);
}
