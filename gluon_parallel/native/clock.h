/* Times in nanoseconds. */
#ifndef CLOCK_H
#define CLOCK_H

#include <stdint.h>
#include <time.h>

#define SECOND 1000000000

static inline int64_t now(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (int64_t)time.tv_sec * SECOND + time.tv_nsec;
}

static inline struct timespec timespec_of(int64_t nanoseconds)
{
    struct timespec time = {nanoseconds / SECOND, nanoseconds % SECOND};
    return time;
}

#endif
