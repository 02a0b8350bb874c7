/* What is around the library: functions of MXNet, its engine and Python, mutexes shared with Python, and the clock.

   Python fills `gp_external` when it loads the library, so neither MXNet nor Python is needed to build or load it. */
#ifndef EXTERNAL_H
#define EXTERNAL_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

struct Arrival;
struct State;

/* MXNet's functions return 0, or another number after a failure. Python's take Python's lock; they may be called until
   Python has ended, see `Interpreter`. */
typedef struct External {
    int (*MXEnginePushAsyncND)(void *, void *, void *, const void *, void *const *, int, void *const *, int, const int *,
                               int, const char *, _Bool);
    int (*MXImperativeInvoke)(void *, int, void *, int *, void *, int, const char **, const char **);
    int (*MXInvokeCachedOp)(void *, int, void *, int *, void *);
    int (*MXEnginePushSyncND)(void *function, void *param, void *deleter, const void *device, void *read, int num_read,
                              void *written, int num_written, const void *property, int priority, const char *name);
    int (*MXShallowCopyNDArray)(void *, void *);
    int (*MXNDArrayGetGradState)(void *, int *);
    int (*MXNDArraySetGradState)(void *, int);
    int (*MXAutogradBackwardEx)(unsigned, void **, void **, unsigned, void **, int, int, int, void ***, int **);
    int (*MXNDArrayCreateNone)(void *);
    int (*MXNDArrayFree)(void *);
    int (*MXNDArrayGetData)(void *, void *);
    int (*MXNDArrayReshape64)(void *, int, int64_t *, _Bool, void *);
    int (*MXNDArraySyncCopyFromCPU)(void *, const void *, uint64_t);
    int (*MXNDArraySyncCopyToCPU)(void *, void *, uint64_t);
    int (*MXNDArrayToDLPack)(void *, void *);
    int (*MXNDArrayCallDLPackDeleter)(void *);
    int (*MXNDArrayGetContext)(void *, int *, int *);
    int (*MXNDArrayGetShapeEx)(void *, int *, const int **);
    int (*start_between_hosts)(int64_t number, int64_t call); /* MPI's operation with that number */
    int (*arrived_above_zero)(struct Arrival *);              /* the result means nothing */
    int (*make_reducers)(void);                                  /* with new gradients; the result means nothing */
    /* Of `wait_on` and `refuse`, the results mean nothing. The first may close the layer; otherwise the device waits on.
       The second closes it: the device takes no part in that exchange, or comes twice. */
    int (*wait_on)(struct State *, int64_t key, const int8_t *arrived);
    int (*refuse)(struct State *, int64_t key);
    int (*allreduce_processes)(struct State *, int64_t key, double *values, int64_t has_begun);
    int (*fail)(struct State *, int64_t reason, int64_t num, void **arrays);
    int (*describe)(int64_t num, char **keys, char **values, void *result);
    int (*create)(const char *device, int64_t num, unsigned **shapes, const int *num_axes, const int *dtypes,
                  void *result, void *description);
} External;

extern External gp_external; /* exported */

/* DLPack's description of an array. */
typedef struct DLTensor {
    char *data;
    int64_t device;
    int32_t num_axes;
    int32_t dtype; /* from the lowest byte on: kind, bits, lanes */
    int64_t *shape;
    int64_t *strides;
    int64_t byte_offset;
} DLTensor;

/* The engine's CallbackOnComplete, given to a function that it runs. The function may copy it, and end later elsewhere. */
typedef struct OnComplete {
    void (*callback)(void *, void *, void *);
    void *engine;
    void *param;
} OnComplete;

/* `error` is NULL, or the address of the engine's exception. */
static inline void complete(const OnComplete *waiting, void *error)
{
    waiting->callback(waiting->engine, waiting->param, error);
}

/* Whether Python can still be called. */
typedef struct Interpreter {
    _Atomic int64_t has_ended;
    _Atomic int64_t num_calls; /* threads that have read `has_ended` and have not yet returned from Python */
} Interpreter;

/* An array that is waited for. The record, and the array's memory, are Python's. */
typedef struct Arrival {
    _Atomic int32_t arrived; /* whether the array is ready, or has failed */
    const double *value;     /* NULL, or one of the array's: Python is told first where it is above 0 */
    void *array;             /* MXNet's handle */
} Arrival;

/* Make a recursive mutex in this memory. */
void gp_make_mutex(pthread_mutex_t *memory);

#define SECOND 1000000000 /* times are in nanoseconds */

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
