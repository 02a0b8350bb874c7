/* Exchanges between the processes of one host, through shared memory.

   Every key has a row of shared memory per process. A process writes its values there and says that it has arrived;
   when all have, each reads all rows, and says that it has left. Records other than `Line` belong to one process. */
#ifndef HOST_H
#define HOST_H

#include <stddef.h>
#include <stdint.h>

#include "recorder.h"

/* What one process tells those of its host: a line of the cache; others write only its bell and `sleeps`.

   It has one at the beginning of the memory, and one before the rows of each key. An exchange is known by its number. */
typedef struct Line {
    _Atomic int64_t bell;            /* counted up to wake the process's driver; at a key, a thread that waits for this key */
    _Atomic int64_t sleeps;          /* 1 while the thread that waits for the bell sleeps and nobody has woken it */
    _Atomic int64_t num_arrivals;    /* how often the process has arrived, at all keys: a sign of life */
    _Atomic int64_t arrived;         /* at a key, as the next two: number of the last exchange for which its row is written */
    _Atomic int64_t last_read;       /* number of the last exchange of which it has read all rows */
    _Atomic int64_t awaits_row;      /* number of the exchange that waits until all have read its row's old values */
    _Atomic int64_t summed;          /* number of the last exchange whose sum over the hosts is there (first process), or whose shard it summed */
    int64_t unused;
} Line;

/* The processes of this host, as this one sees them. */
typedef struct Host {
    int64_t size;
    int64_t rank;
    Line *lines;                             /* one of each process */
    void *_Atomic failed;                    /* NULL, or the engine's exception with which all exchanges end */
    void *errors;                            /* the mutex `one_error_at_a_time` */
    void *pushing;                           /* a mutex: exchanges are numbered in the order in which they are pushed */
    _Atomic int64_t stopped;
    _Atomic int64_t num_exchanges;
    struct HostExchange *const *exchanges;   /* a table that others are added to */
    int64_t patience;                        /* nanoseconds that a thread waits in `gp_gather` */
    Recorder *recorder;
    int64_t num_hosts;
} Host;

/* A key, as this process sees it. */
typedef struct HostKey {
    Line *lines;                 /* one of each process */
    int64_t num_values;          /* of a row; for gathering, bytes */
    int64_t dtype;
    int64_t depth;               /* how many rows a process has */
    _Atomic int64_t next_number; /* number of the exchange to come next; 0 before all processes have agreed */
    _Atomic int64_t num_queued;
    int64_t pushed;              /* number of the exchange that was handed to MXNet's engine last */
    int64_t name;                /* the flight recorder's number of the key */
    int64_t record;              /* and of a gather */
    int64_t number;              /* for `start_between_hosts` */
    int64_t sums_shards;         /* whether each process adds up a shard of the rows, and reads the others' sums */
    char *const *rows;           /* (depth, processes) */
    char **rows_of_hosts;        /* (hosts): each host's row, by MPI; NULL unless few hosts have one process each. Of two hosts
                                   this one's is first: its row, or its array itself (`is_sent_directly`) */
} HostKey;

#define WORTH 65536 /* bytes from which on memory that is not needed is given back */

/* One of the arrays that travel together, or a range of one's values. */
typedef struct Segment {
    int64_t num_values;    /* of the whole array */
    int64_t offset;        /* bytes from the beginning of a row to where the array's first value would be */
    char *result;          /* its sum over the hosts */
    const int64_t *bounds; /* (processes + 1): which of its values each process owns; NULL: it is summed whole */
} Segment;

/* States of an exchange. */
enum {
    IDLE,    /* not under way */
    PUSHED,  /* queued in MXNet's engine, until its arrays are ready */
    QUEUED,  /* waits for the key's exchange before it */
    AWAITING_ROW, /* waits until all processes have read what its row held before */
    WAITING, /* waits until all processes have arrived */
    SUMMING, /* waits for MPI's sum over the hosts, or for the shards that others add up */
    BUSY     /* one thread works on it */
};

/* One exchange at a time of one key. */
typedef struct HostExchange {
    _Atomic int64_t state;
    Host *host;
    HostKey *key;
    _Atomic int64_t number;    /* threads that do not have the exchange read this and `problem`, too */
    int64_t num_read;
    int64_t num_written;
    int64_t num_bytes;         /* of a row */
    int64_t num_segments;
    const Segment *segments;
    int64_t gathers;           /* with bounds: 1: all-gather from the owners; 0: reduce-scatter to them */
    int64_t releases;          /* whether the pages of values of other owners are given back once they are sent */
    OnComplete waiting;
    _Atomic int64_t problem;   /* whether one of its arrays is in oneDNN's layout */
    int64_t record;            /* the flight recorder's number */
    void *const *handles;      /* MXNet's, of its arrays; the arrays that it reads come first */
    char **arrays;             /* where their values are */
    int64_t device;            /* a `mxnet::Context`; it and what follows, to `num_changed`, are for the engine */
    const char *title;
    void *const *once;         /* the same handles without repetition: those of arrays that are only read come first */
    int64_t num_only_read;
    int64_t num_changed;
    struct HostExchange *_Atomic twin; /* another one over these arrays, for when this one is under way; or NULL */
} HostExchange;

/* Count up the bell of a line, and wake the thread that sleeps on it; or of all lines but this process's. */
void ring(Line *line);
void ring_others(const Host *host, Line *lines);

/* Sleep until the bell of a line is not `bell` any more; `limit` is in nanoseconds, 0 for none. */
void wait_for_bell(Line *line, int64_t bell, int64_t limit);

/* The engine calls it when an exchange's arrays are ready. */
void gp_begin_exchange(void *run_context, const OnComplete *on_complete, HostExchange *exchange);

/* Whether all processes have come to that number in a field of the key's lines, which is so many bytes from their begin. */
_Bool all_have(const Host *host, const HostKey *key, size_t field, int64_t number);

/* Steps of an exchange, by the thread that has it. Sum this process's devices into its row: */
void arrive(HostExchange *exchange);

/* All of this host have arrived: add up their rows (depth 1) in this process's; MPI sums over the hosts. */
void sum_over_hosts(HostExchange *exchange);

/* Or add up this process's shard of the rows in its array, and write it to its row for the others. */
void sum_shard(HostExchange *exchange);

/* The rows' sum goes to this process's devices. */
void leave(HostExchange *exchange);

/* The exchange failed in `state`: overwrite its outputs, so that nobody uses partial sums, by NaN (all bits 1), int32 by 0. */
void spoil(HostExchange *exchange, int64_t state);

/* Gather vectors of the processes of a host: rows go to `out` (processes, bytes). Any thread that holds the key's mutex
   calls it. `vector` is this process's, or NULL if its row is written already. Returns whether all have arrived; if not,
   `out` is as it was, and the call is to be repeated with NULL. */
int64_t gp_gather(Host *host, HostKey *key, int64_t number, const void *vector, char *out);

/* The driver's thread: move exchanges whenever another process rings, until it is stopped. `gp_wake` wakes it to see
   that. */
void gp_drive(Host *host);
void gp_wake(Host *host);

/* Move all exchanges of this process. Python calls it without its lock: it may wait for the mutex `errors`, whose holder
   may wait for Python's lock. */
void gp_look(Host *host);

/* Python calls it when MPI has summed over the hosts, at so many keys the exchanges of these numbers. */
void gp_summed(Host *host, HostKey *const *keys, const int64_t *numbers, int64_t num);

#endif
