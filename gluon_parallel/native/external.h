/* Functions of MXNet and of Python that the library calls. Python fills the struct when it loads the library.

   MXNet's functions return 0, or another number after a failure. Python's take Python's lock; they may be called until
   Python has ended, see `Interpreter`. The library needs neither MXNet nor Python to be built or loaded. */
#ifndef EXTERNAL_H
#define EXTERNAL_H

#include <pthread.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

struct Arrival;
struct State;

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
    int (*MXNDArrayCreateNone)(void *);
    int (*MXNDArrayFree)(void *);
    int (*MXNDArrayGetData)(void *, void *);
    int (*MXNDArrayReshape64)(void *, int, int64_t *, _Bool, void *);
    int (*MXNDArraySyncCopyFromCPU)(void *, const void *, uint64_t);
    int (*MXNDArraySyncCopyToCPU)(void *, void *, uint64_t);
    int (*MXNDArrayToDLPack)(void *, void *);
    int (*MXNDArrayCallDLPackDeleter)(void *);
    int (*start_between_hosts)(int64_t number, int64_t call); /* MPI's operation with that number */
    int (*arrived_above_zero)(struct Arrival *);              /* the result means nothing */
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

extern External gp_external; /* exported, by `external.c` */

/* Mutexes that Python and the library hold. The first function makes a recursive one in the memory that Python gives.
   `gp_lock` returns 0 when the mutex is held, or another number if it is not after a moment, in which Python looks for
   Ctrl-C. */
void gp_make_mutex(pthread_mutex_t *memory);
int64_t gp_lock(pthread_mutex_t *mutex);
void gp_unlock(pthread_mutex_t *mutex);

#endif
