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

/* The sum over this process's devices goes to its row, or stays in its only array, from where MPI sends it. */
static void write_sum(const HostExchange *exchange, const Segment *segment, char *const *sources, int64_t num_devices, char *row)
{
    const Host *host = exchange->host;
    const HostKey *key = exchange->key;
    _Bool stays = is_sent_directly(exchange);
    if (!stays)
        sum_arrays(key->dtype, wide(key->dtype), sources, 0, num_devices, row + segment->offset, 0, segment->num_values);
    if (key->rows_of_hosts && host->num_hosts == 2)
        key->rows_of_hosts[0] = stays ? sources[0] : row;
}

/* Of a reduce-scatter, the sum over this process's devices goes to its row, for the owners of its shards. */
static void write_for_owners(const HostExchange *exchange, const Segment *segment, char *const *sources, int64_t num_devices,
                        char *row)
{
    const Host *host = exchange->host;
    const int64_t *bounds = segment->bounds, dtype = exchange->key->dtype;
    sum_arrays(dtype, dtype, sources, 0, num_devices, row + segment->offset, bounds[0], bounds[host->size]);
    for (int64_t device = 0; exchange->releases && device < num_devices; device++) {
        release(dtype, sources[device], bounds[0], bounds[host->rank]);
        release(dtype, sources[device], bounds[host->rank + 1], bounds[host->size]);
    }
}

/* Without bounds, an array is summed whole. With bounds, each process owns a shard of it: in an all-gather it writes its
   own shard to its row; in a reduce-scatter it writes all, and the owners add them up. */
void arrive(HostExchange *exchange)
{
    Host *host = exchange->host;
    HostKey *key = exchange->key;
    int64_t number = exchange->number, num_devices = exchange->num_read / exchange->num_segments;
    char *row = key->rows[number % key->depth * host->size + host->rank];
    for (int64_t n = 0; n < exchange->num_segments; n++) {
        const Segment *segment = &exchange->segments[n];
        const int64_t *bounds = segment->bounds;
        char *const *sources = exchange->arrays + n * num_devices;
        if (!bounds)
            write_sum(exchange, segment, sources, num_devices, row);
        else if (exchange->gathers)
            copy(key->dtype, sources[0], row + segment->offset, bounds[host->rank], bounds[host->rank + 1]);
        else
            write_for_owners(exchange, segment, sources, num_devices, row);
    }
    key->lines[host->rank].arrived = number;
    host->lines[host->rank].num_arrivals++;
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

/* The first value of the shard that process `rank` adds up; a multiple of 16, so that shards share no line of the cache. */
static int64_t shard_begin(const Host *host, const HostKey *key, int64_t rank)
{
    return rank == host->size ? key->num_values : key->num_values * rank / host->size / 16 * 16;
}

void sum_shard(HostExchange *exchange)
{
    Host *host = exchange->host;
    HostKey *key = exchange->key;
    int64_t number = exchange->number, begin = shard_begin(host, key, host->rank), end = shard_begin(host, key, host->rank + 1);
    char *const *rows = key->rows + number % key->depth * host->size, **out = exchange->arrays + exchange->num_read;
    sum_arrays(wide(key->dtype), key->dtype, rows, 0, host->size, *out, begin, end);
    sum_arrays(key->dtype, wide(key->dtype), out, 0, 1, rows[host->rank], begin, end);
    key->lines[host->rank].summed = number;
    if (all_have(host, key, offsetof(Line, summed), number))
        ring_others(host, host->lines);
}

/* Each process has added up a shard of the rows: read those of the others. */
static void read_summed_shards(const Host *host, const HostKey *key, char *const *rows, char *out)
{
    for (int64_t rank = 0; rank < host->size; rank++)
        if (rank != host->rank)
            sum_arrays(wide(key->dtype), key->dtype, rows + rank, 0, 1, out, shard_begin(host, key, rank),
                       shard_begin(host, key, rank + 1));
}

/* The sum of a whole array: of the rows of two or three hosts, of this one's rows, or MPI's, which is read. */
static void read_sum(const Host *host, const HostKey *key, const Segment *segment, char *const *rows, char *out)
{
    int64_t num = host->num_hosts, offset = 0; /* one host: one array per row */
    if (key->rows_of_hosts)
        rows = key->rows_of_hosts, offset = segment->offset;
    else if (host->num_hosts == 1)
        num = host->size;
    else
        rows = &segment->result, num = 1;
    sum_arrays(wide(key->dtype), key->dtype, rows, offset, num, out, 0, segment->num_values);
}

/* Of an all-gather: read the shards of the other owners. */
static void read_from_owners(const Host *host, const HostKey *key, const Segment *segment, char *const *rows, char *out)
{
    for (int64_t rank = 0; rank < host->size; rank++)
        if (rank != host->rank)
            copy(key->dtype, rows[rank] + segment->offset, out, segment->bounds[rank], segment->bounds[rank + 1]);
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
        if (key->sums_shards) {
            read_summed_shards(host, key, rows, outs[0]);
        } else if (!bounds) {
            read_sum(host, key, segment, rows, outs[0]);
        } else if (exchange->gathers) {
            begin = bounds[0], end = bounds[host->size];
            read_from_owners(host, key, segment, rows, outs[0]);
        } else { /* reduce-scatter: the own shard */
            begin = bounds[host->rank], end = bounds[host->rank + 1];
            sum_arrays(key->dtype, key->dtype, rows, segment->offset, host->size, outs[0], begin, end);
        }
        for (int64_t device = 1; device < num_devices; device++)
            copy(key->dtype, outs[0], outs[device], begin, end);
    }
    key->lines[host->rank].last_read = number;
    for (int64_t rank = 0; rank < host->size; rank++)
        if (rank != host->rank && key->lines[rank].awaits_row == number + key->depth)
            ring(&host->lines[rank]);
    key->next_number = number + 1;
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
        host->lines[host->rank].num_arrivals++;
        if (all_have(host, key, offsetof(Line, arrived), number))
            ring_others(host, key->lines);
    }
    if (!wait_for_all(host, key, number))
        return 0;
    for (int64_t rank = 0; rank < host->size; rank++)
        memcpy(out + rank * num_bytes, rows[rank], (size_t)num_bytes);
    line->last_read = number;
    gp_recorder_end(host->recorder, key->record, 0);
    return 1;
}
