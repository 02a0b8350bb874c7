/* Limit for a part of this process's end: a thread ends it, also where a function holds Python's lock for ever. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "external.h"

static _Atomic int64_t current; /* number of the last call of `gp_end_within` */

struct Limit {
    int64_t number, milliseconds;
    char text[]; /* what is said on standard error */
};

static void *wait_for_end(void *given)
{
    struct Limit *limit = given;
    struct timespec rest = {limit->milliseconds / 1000, limit->milliseconds % 1000 * 1000000};
    while (nanosleep(&rest, &rest)) {
    }
    if (current == limit->number) {
        if (write(2, limit->text, strlen(limit->text)) < 0)
            _exit(1); /* the same; nobody can be told */
        _exit(1);
    }
    free(limit);
    return NULL;
}

/* End this process with status 1 after so many milliseconds, with this text, unless the next call comes before; 0: no
   more than take the last limit away. Returns 0, or -1 where there is no thread for it. */
EXPORT int64_t gp_end_within(int64_t milliseconds, int64_t text)
{
    int64_t number = ++current;
    if (!milliseconds)
        return 0;
    struct Limit *limit = malloc(sizeof *limit + strlen((const char *)text) + 1);
    if (!limit)
        return -1;
    limit->number = number, limit->milliseconds = milliseconds;
    strcpy(limit->text, (const char *)text);
    pthread_t thread;
    if (pthread_create(&thread, NULL, wait_for_end, limit)) {
        free(limit);
        return -1;
    }
    return pthread_detach(thread);
}
