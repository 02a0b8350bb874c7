/* What MXNet's engine hands to a function that it runs, and how the function says that it has ended. */
#ifndef ENGINE_H
#define ENGINE_H

#include <stdint.h>

/* The engine's CallbackOnComplete. A function may copy it, and end later in another thread. */
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

/* What `gp_delete` is called with when MXNet deletes an operator or its description. */
typedef struct Deletion {
    Interpreter *python;
    int (*function)(int64_t);
    int64_t argument;
} Deletion;

#endif
