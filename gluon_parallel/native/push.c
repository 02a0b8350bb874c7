/* Hands exchanges to MXNet's engine, which begins each one when its arrays are ready. */
#include <pthread.h>

#include "external.h"
#include "host.h"

enum { AT_ONCE = 4 }; /* FnProperty kAsync: it never waits, so the thread that pushes it may run it */

EXPORT int64_t gp_push(Host *host, HostExchange *const *exchanges, const int64_t *priorities, int64_t begin, int64_t num)
{
    static const int property = AT_ONCE;
    int64_t n = begin;
    pthread_mutex_lock(host->pushing);
    for (; n < num; n++) {
        HostExchange *one = exchanges[n];
        while (one && one->state != IDLE)
            one = one->twin;
        if (!one)
            break;
        one->number = ++one->key->pushed;
        one->state = PUSHED;
        if (gp_external.MXEnginePushAsyncND((void *)gp_begin_exchange, one, 0, &one->device, one->once,
                                            (int)one->num_only_read, one->once + one->num_only_read,
                                            (int)one->num_changed, &property, (int)priorities[n], one->title, 0)) {
            one->key->pushed--;
            one->state = IDLE;
            n = ~n;
            break;
        }
    }
    pthread_mutex_unlock(host->pushing);
    return n;
}
