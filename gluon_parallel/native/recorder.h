/* Flight recorder: the last exchanges and rendezvous of this process, in memory that other processes of the host read.

   Any thread may begin and end an entry, without a lock. A reader may see an entry while it is written; its number is
   0 then. */
#ifndef RECORDER_H
#define RECORDER_H

#include "external.h"

#define CAPACITY 2048        /* entries of the ring */
#define GAVE_UP (-2)         /* in the place of `done`: the others did not come within the limit, or were lost */
#define NUM_NAMES 16384      /* a key has three names on one host, a SyncBatchNorm layer six; name 0 is for all others */
#define NAME_BYTES 128

/* An exchange or rendezvous, in a line of the cache; times are nanoseconds of the monotonic clock. */
typedef struct RingEntry {
    _Atomic int64_t number; /* of the ring's entries, from 1; 0 while the entry is written */
    int64_t name;           /* number of what it is about */
    int64_t call;           /* how often that was begun, from 1 */
    int64_t size;           /* bytes */
    int64_t asked;          /* when it began */
    int64_t done;           /* when it ended; 0 as long as it waits, or GAVE_UP */
    int64_t unused[2];
} RingEntry;

/* What a process records. */
typedef struct RecorderMemory {
    _Atomic int64_t num_begun;
    int64_t process; /* the number by which the system knows the process */
    int64_t stack;   /* number of its open file with the stack of its main thread; 0 if it has none */
    int64_t unused[5];
    RingEntry ring[CAPACITY];
    char names[NUM_NAMES][NAME_BYTES]; /* the system gives memory to those alone that are used */
} RecorderMemory;

/* Where this process records: that changes when it shares its memory. */
typedef struct Recorder {
    RecorderMemory *_Atomic memory;
} Recorder;

/* An exchange that runs inside another library, between two functions in the engine. */
typedef struct RecordedExchange {
    Recorder *recorder;
    int64_t name;
    int64_t call;
    int64_t size;
    int64_t record;       /* number of its entry, once it has begun */
    _Atomic int64_t busy; /* 0 when it has ended */
} RecordedExchange;

/* Record that call number `call` of `name` begins; returns the entry's number. */
int64_t gp_recorder_begin(Recorder *recorder, int64_t name, int64_t call, int64_t size);

/* Record when it ended, unless so much was recorded since that its entry is gone. `done` is 0 for now, or
   GAVE_UP. */
void gp_recorder_end(Recorder *recorder, int64_t number, int64_t done);

#endif
