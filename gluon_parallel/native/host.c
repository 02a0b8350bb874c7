/* Sums through shared memory: MXNet's engine and a thread of the process run them without Python's lock.

   A process sums the gradients of its devices into its row; who finds that all have arrived adds the rows up in rank
   order, into its own arrays. So all processes get the same bits, nothing is sent, and the last process waits for none.
   Those that came earlier are finished by their driver, a thread that sleeps until another process rings. Where there
   are several hosts, the first process of each adds up its rows and has MPI sum over the hosts; the others read the
   result.

   Where many processes sum long rows, each adds up a shard of them, and takes the other shards' sums from the others' rows.

   Where values have owners, on one host, each process copies its gradient into its row and adds up what it owns; or it
   copies what it owns into its row, and what others own from theirs. */
#include "host.h"

#include <sched.h>
#include <stdatomic.h>

/* Whether the exchange has no reason to stay in `state`. */
static _Bool can_move(const HostExchange *exchange, int64_t state)
{
    const Host *host = exchange->host;
    const HostKey *key = exchange->key;
    if (host->failed)
        return 1;
    if (state == QUEUED)
        return key->next_number == exchange->number;
    if (exchange->problem)
        return 0; /* until Python has seen it */
    if (state == AWAITING_ROW)
        return all_have(host, key, offsetof(Line, last_read), exchange->number - key->depth);
    if (state == SUMMING && key->sums_shards)
        return all_have(host, key, offsetof(Line, summed), exchange->number);
    if (state == SUMMING || (host->num_hosts > 1 && host->rank != 0))
        return key->lines[0].summed >= exchange->number;
    return all_have(host, key, offsetof(Line, arrived), exchange->number);
}

/* Tell the engine that the exchange has ended; returns the one that can go on because of this, or NULL. */
static HostExchange *finish(HostExchange *exchange, void *error)
{
    Host *host = exchange->host;
    HostKey *key = exchange->key;
    int64_t following = exchange->number + 1;
    OnComplete waiting = exchange->waiting;
    if (error)
        gp_recorder_end(host->recorder, exchange->record, GAVE_UP);
    exchange->state = IDLE; /* from here on it may be used anew */
    if (error)
        pthread_mutex_lock(host->errors);
    complete(&waiting, error);
    if (error)
        pthread_mutex_unlock(host->errors);
    if (key->num_queued > 0)
        for (int64_t n = 0; n < host->num_exchanges; n++)
            if (host->exchanges[n]->key == key && host->exchanges[n]->number == following)
                return host->exchanges[n];
    return 0;
}

/* Take an exchange as far as it can go now; returns the one that can go on because this one has ended, or NULL. */
static HostExchange *move(HostExchange *exchange)
{
    for (;;) {
        int64_t state = exchange->state;
        if (state < QUEUED || state == BUSY || !atomic_compare_exchange_strong(&exchange->state, &state, BUSY))
            return 0; /* it does not wait, or another thread has it */
        Host *host = exchange->host;
        HostKey *key = exchange->key;
        while (can_move(exchange, state)) { /* again, now that no other thread can move it */
            void *error = host->failed;
            if (error) {
                spoil(exchange, state);
                return finish(exchange, error);
            }
            if (state == QUEUED) {
                key->num_queued--;
                key->lines[host->rank].awaits_row = exchange->number;
                state = AWAITING_ROW;
            } else if (state == AWAITING_ROW) {
                arrive(exchange);
                state = WAITING;
            } else if (state == WAITING && host->num_hosts > 1 && host->rank == 0) {
                sum_over_hosts(exchange);
                state = SUMMING;
            } else if (state == WAITING && key->sums_shards) {
                sum_shard(exchange);
                state = SUMMING;
            } else {
                leave(exchange);
                return finish(exchange, 0);
            }
        }
        exchange->state = state;
        if (!can_move(exchange, state))
            return 0; /* a thread that changes that from now on rings, and finds the exchange in this state */
    }
}

EXPORT void gp_look(Host *host)
{
    for (int64_t n = 0; n < host->num_exchanges; n++) {
        HostExchange *exchange = host->exchanges[n];
        while (exchange)
            exchange = move(exchange);
    }
}

EXPORT void gp_summed(Host *host, HostKey *const *keys, const int64_t *numbers, int64_t num)
{
    for (int64_t n = 0; n < num; n++)
        keys[n]->lines[0].summed = numbers[n];
    ring_others(host, host->lines);
    gp_look(host);
}

EXPORT void gp_wake(Host *host)
{
    ring(&host->lines[host->rank]);
}

EXPORT void gp_drive(Host *host)
{
    Line *line = &host->lines[host->rank];
    int64_t bell = line->bell; /* read before `stopped` is: that is written first, and then the bell rings */
    while (!host->stopped) {
        gp_look(host);
        line->sleeps = 1;
        if (line->bell == bell)
            wait_for_bell(line, bell, 0);
        line->sleeps = 0;
        sched_yield(); /* the thread that rang may be about to finish more exchanges */
        bell = line->bell;
    }
}

EXPORT void gp_begin_exchange(void *run_context, const OnComplete *on_complete, HostExchange *exchange)
{
    (void)run_context;
    Host *host = exchange->host;
    HostKey *key = exchange->key;
    exchange->record = gp_recorder_begin(host->recorder, key->name, exchange->number, exchange->num_bytes);
    exchange->waiting = *on_complete;
    exchange->problem = 0;
    for (int64_t n = 0; n < exchange->num_read + exchange->num_written; n++) {
        DLTensor *tensor;
        if (gp_external.MXNDArrayToDLPack(exchange->handles[n], &tensor)) {
            exchange->problem = 1; /* it lies in oneDNN's layout; to ask for its memory would mean to wait for it */
            continue;
        }
        exchange->arrays[n] = tensor->data + tensor->byte_offset;
        gp_external.MXNDArrayCallDLPackDeleter(tensor);
    }
    key->num_queued++;
    exchange->state = QUEUED;
    while (exchange)
        exchange = move(exchange);
}

enum { AT_ONCE = 4 }; /* FnProperty kAsync: it never waits, so the thread that pushes it may run it */

/* Push exchanges[begin] to exchanges[num - 1]; for one that is under way, its first idle twin. Python calls it for all sums
   of a step. Ctrl-C cannot come between an exchange's numbering and its push.

   Returns `num`; or the index of the first one not pushed, as it and all its twins are under way; or, of one that the
   engine has refused, its index inverted (~). */
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
