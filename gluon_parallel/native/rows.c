/* Steps of an exchange through a host's shared memory (arrive, sum, leave, spoil), and the gathering of vectors; see
   `host.h`. Threads that wait sleep on a futex in that memory. */
#include "host.h"

#include <linux/futex.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sums.h"

#define LOOKS 200 /* some microseconds, before a thread that waits sleeps; on few cores it must not take longer */

void ring(Line *line)
{
    line->bell++;
    if (line->sleeps && atomic_exchange(&line->sleeps, 0)) /* whoever rings next finds the thread awake, or about to be */
        syscall(SYS_futex, &line->bell, FUTEX_WAKE, 1, 0, 0, 0);
}

void wait_for_bell(Line *line, int64_t bell, int64_t limit)
{
    struct timespec time = timespec_of(limit); /* the futex is the bell's lower half, on little-endian machines */
    syscall(SYS_futex, &line->bell, FUTEX_WAIT, (uint32_t)bell, limit ? &time : 0, 0, 0);
}

_Bool all_have(const Host *host, const HostKey *key, size_t field, int64_t number)
{
    for (int64_t rank = 0; rank < host->size; rank++)
        if (*(_Atomic int64_t *)((char *)&key->lines[rank] + field) < number)
            return 0;
    return 1;
}

void ring_others(const Host *host, Line *lines)
{
    for (int64_t rank = 0; rank < host->size; rank++)
        if (rank != host->rank)
            ring(&lines[rank]);
}

static void copy(int64_t dtype, const char *source, char *out, int64_t begin, int64_t end)
{
    int64_t size = size_of(dtype);
    memcpy(out + begin * size, source + begin * size, (size_t)((end - begin) * size));
}

/* Give the memory of these values of an array back to the system, as far as it is whole pages: they become zero. */
static void release(int64_t dtype, char *array, int64_t begin, int64_t end)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = ((uintptr_t)(array + begin * size_of(dtype)) + page - 1) / page * page;
    uintptr_t last = (uintptr_t)(array + end * size_of(dtype)) / page * page;
    if (last < first + WORTH - page)
        return;
    madvise((void *)first, last - first, MADV_HUGEPAGE); /* fewer page faults in the next backward pass */
    madvise((void *)first, last - first, MADV_DONTNEED);
}

/* Whether MPI sends the exchange's array from where it is, not from the row. */
static _Bool is_sent_directly(const HostExchange *exchange)
{
    const HostKey *key = exchange->key;
    return key->rows_of_hosts && exchange->host->num_hosts == 2 && exchange->num_read == 1 && key->dtype == wide(key->dtype);
}

/* Without bounds, an array is summed whole. With bounds, each process owns a part of it: in an all-gather it writes its
   own part to its row; in a reduce-scatter it writes all, and the owners add them up. */
void arrive(HostExchange *exchange)
{
    Host *host = exchange->host;
    HostKey *key = exchange->key;
    int64_t number = exchange->number, num_devices = exchange->num_read / exchange->num_segments;
    char *row = key->rows[number % key->depth * host->size + host->rank];
    for (int64_t n = 0; n < exchange->num_segments; n++) {
        const Segment *segment = &exchange->segments[n];
        char *const *sources = exchange->arrays + n * num_devices, *part_of_row = row + segment->offset;
        const int64_t *bounds = segment->bounds;
        if (!bounds && is_sent_directly(exchange)) {
            key->rows_of_hosts[0] = sources[0];
            continue;
        }
        if (!bounds) {
            sum_arrays(key->dtype, wide(key->dtype), sources, 0, num_devices, part_of_row, 0, segment->num_values);
            if (key->rows_of_hosts && host->num_hosts == 2)
                key->rows_of_hosts[0] = row;
            continue;
        }
        int64_t own_begin = bounds[host->rank], own_end = bounds[host->rank + 1];
        if (exchange->gathers) {
            copy(key->dtype, sources[0], part_of_row, own_begin, own_end);
            continue;
        }
        sum_arrays(key->dtype, key->dtype, sources, 0, num_devices, part_of_row, bounds[0], bounds[host->size]);
        for (int64_t device = 0; exchange->releases && device < num_devices; device++) {
            release(key->dtype, sources[device], bounds[0], own_begin);
            release(key->dtype, sources[device], own_end, bounds[host->size]);
        }
    }
    key->lines[host->rank].arrived = number;
    host->lines[host->rank].beat++;
    if (all_have(host, key, offsetof(Line, arrived), number)) {
        if (host->num_hosts == 1)
            ring_others(host, host->lines);
        else if (host->rank != 0)
            ring(&host->lines[0]);
    }
}

void sum_over_hosts(HostExchange *exchange)
{
    const HostKey *key = exchange->key;
    int64_t dtype = wide(key->dtype);
    if (exchange->host->size > 1)
        sum_arrays(dtype, dtype, key->rows, 0, exchange->host->size, key->rows[0], 0, key->num_values);
    gp_external.start_between_hosts(key->number, exchange->number);
}

/* The first value of the part that process `rank` adds up; a multiple of 16, so that parts share no line of the cache. */
static int64_t part_begin(const Host *host, const HostKey *key, int64_t rank)
{
    return rank == host->size ? key->num_values : key->num_values * rank / host->size / 16 * 16;
}

void sum_part(HostExchange *exchange)
{
    Host *host = exchange->host;
    HostKey *key = exchange->key;
    int64_t number = exchange->number, begin = part_begin(host, key, host->rank), end = part_begin(host, key, host->rank + 1);
    char *const *rows = key->rows + number % key->depth * host->size, **out = exchange->arrays + exchange->num_read;
    sum_arrays(wide(key->dtype), key->dtype, rows, 0, host->size, *out, begin, end);
    sum_arrays(key->dtype, wide(key->dtype), out, 0, 1, rows[host->rank], begin, end);
    key->lines[host->rank].summed = number;
    if (all_have(host, key, offsetof(Line, summed), number))
        ring_others(host, host->lines);
}

void leave(HostExchange *exchange)
{
    Host *host = exchange->host;
    HostKey *key = exchange->key;
    int64_t number = exchange->number, num_devices = exchange->num_written / exchange->num_segments;
    char *const *rows = key->rows + number % key->depth * host->size;
    for (int64_t n = 0; n < exchange->num_segments; n++) {
        const Segment *segment = &exchange->segments[n];
        char **outs = exchange->arrays + exchange->num_read + n * num_devices;
        const int64_t *bounds = segment->bounds;
        int64_t begin = 0, end = segment->num_values;
        if (key->sums_parts) { /* the other processes' parts of the sum */
            for (int64_t rank = 0; rank < host->size; rank++)
                if (rank != host->rank)
                    sum_arrays(wide(key->dtype), key->dtype, rows + rank, 0, 1, outs[0], part_begin(host, key, rank),
                               part_begin(host, key, rank + 1));
        } else if (!bounds && key->rows_of_hosts) { /* two or three hosts: their rows are added up here */
            sum_arrays(wide(key->dtype), key->dtype, key->rows_of_hosts, segment->offset, host->num_hosts, outs[0], begin, end);
        } else if (!bounds) { /* one host: one array per row, so offset 0 */
            char *const result = segment->result, *const *sources = host->num_hosts == 1 ? rows : &result;
            sum_arrays(wide(key->dtype), key->dtype, sources, 0, host->num_hosts == 1 ? host->size : 1, outs[0], begin, end);
        } else if (exchange->gathers) { /* all-gather: the other owners' parts */
            begin = bounds[0], end = bounds[host->size];
            for (int64_t rank = 0; rank < host->size; rank++)
                if (rank != host->rank)
                    copy(key->dtype, rows[rank] + segment->offset, outs[0], bounds[rank], bounds[rank + 1]);
        } else { /* reduce-scatter: the own part */
            begin = bounds[host->rank], end = bounds[host->rank + 1];
            sum_arrays(key->dtype, key->dtype, rows, segment->offset, host->size, outs[0], begin, end);
        }
        for (int64_t device = 1; device < num_devices; device++)
            copy(key->dtype, outs[0], outs[device], begin, end);
    }
    key->lines[host->rank].left = number;
    for (int64_t rank = 0; rank < host->size; rank++)
        if (rank != host->rank && key->lines[rank].held == number + key->depth)
            ring(&host->lines[rank]);
    key->turn = number + 1;
    gp_recorder_end(host->recorder, exchange->record, 0);
}

void spoil(HostExchange *exchange, int64_t state)
{
    if (exchange->problem || (state == SUMMING && is_sent_directly(exchange)))
        return; /* no plain layout; or MPI may be sending it: others must not get NaN before they hear of the error */
    int64_t dtype = exchange->key->dtype, num_devices = exchange->num_written / exchange->num_segments;
    for (int64_t n = 0; n < exchange->num_written; n++) {
        int64_t size = exchange->segments[n / num_devices].num_values * size_of(dtype);
        memset(exchange->arrays[exchange->num_read + n], dtype == INT32 ? 0 : 0xff, (size_t)size);
    }
}

/* Wait, no longer than the host's patience, until all have arrived; returns whether they have. */
static _Bool wait_for_all(const Host *host, const HostKey *key, int64_t number)
{
    Line *line = &key->lines[host->rank];
    for (int look = 0; look < LOOKS; look++)
        if (all_have(host, key, offsetof(Line, arrived), number))
            return 1;
    int64_t bell = line->bell;
    line->sleeps = 1;
    if (!all_have(host, key, offsetof(Line, arrived), number))
        wait_for_bell(line, bell, host->patience);
    line->sleeps = 0;
    return all_have(host, key, offsetof(Line, arrived), number);
}

EXPORT int64_t gp_gather(Host *host, HostKey *key, int64_t number, const void *vector, char *out)
{
    int64_t num_bytes = key->num_values;
    char *const *rows = key->rows + number % 2 * host->size; /* two each: who writes call n has read call n - 1, so all have read n - 2 */
    Line *line = &key->lines[host->rank];
    if (vector) {
        key->record = gp_recorder_begin(host->recorder, key->name, number, num_bytes);
        memcpy(rows[host->rank], vector, (size_t)num_bytes);
        line->arrived = number;
        host->lines[host->rank].beat++;
        if (all_have(host, key, offsetof(Line, arrived), number))
            ring_others(host, key->lines);
    }
    if (!wait_for_all(host, key, number))
        return 0;
    for (int64_t rank = 0; rank < host->size; rank++)
        memcpy(out + rank * num_bytes, rows[rank], (size_t)num_bytes);
    line->left = number;
    gp_recorder_end(host->recorder, key->record, 0);
    return 1;
}
