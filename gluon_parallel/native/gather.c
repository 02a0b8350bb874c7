/* Gathering of vectors through shared memory: every process gets those of all. Processes sleep on words of memory. */
#include <linux/futex.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"
#include "external.h"
#include "host.h"

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

_Bool all_arrived(const Host *host, const HostKey *key, int64_t number)
{
    for (int64_t rank = 0; rank < host->size; rank++)
        if (key->lines[rank].arrived < number)
            return 0;
    return 1;
}

/* Wait, no longer than the host's patience, until all have arrived; returns whether they have. */
static _Bool wait_for_all(const Host *host, const HostKey *key, int64_t number)
{
    Line *line = &key->lines[host->rank];
    for (int look = 0; look < LOOKS; look++)
        if (all_arrived(host, key, number))
            return 1;
    int64_t bell = line->bell;
    line->sleeps = 1;
    if (!all_arrived(host, key, number))
        wait_for_bell(line, bell, host->patience);
    line->sleeps = 0;
    return all_arrived(host, key, number);
}

EXPORT int64_t gp_gather(Host *host, HostKey *key, int64_t number, const void *vector, char *out)
{
    int64_t num_bytes = key->num_values;
    char *const *rows = key->rows + number % 2 * host->size; /* who arrives has left the call before the last */
    Line *line = &key->lines[host->rank];
    if (vector) {
        key->record = gp_recorder_begin(host->recorder, key->name, number, num_bytes);
        memcpy(rows[host->rank], vector, (size_t)num_bytes);
        line->arrived = number;
        host->lines[host->rank].beat++;
        if (all_arrived(host, key, number))
            for (int64_t rank = 0; rank < host->size; rank++)
                if (rank != host->rank)
                    ring(&key->lines[rank]);
    }
    if (!wait_for_all(host, key, number))
        return 0;
    for (int64_t rank = 0; rank < host->size; rank++)
        memcpy(out + rank * num_bytes, rows[rank], (size_t)num_bytes);
    line->left = number;
    gp_recorder_end(host->recorder, key->record, 0);
    return 1;
}
