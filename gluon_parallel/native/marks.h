/* Marks of gradients: which backward passes have written them. */
#ifndef MARKS_H
#define MARKS_H

#include <stdint.h>

#include "external.h"

/* The gradients of the parameters that are trained together, on all devices. The record and its memory are Python's,
   from `gp_watch` to `gp_unwatch`. */
typedef struct Marks {
    struct Marks *next;
    int64_t num_parameters;
    int64_t num_copies;
    void **handles;      /* of NDArrays, the values: parameter by parameter, `num_copies` each */
    const int8_t *adds;  /* of each parameter, whether passes add to its gradients, so that all of them count */
    int32_t *rounds;     /* of each copy, the number of the round that wrote its gradient; 0: none, or the last use */
    int8_t *in_round;    /* of each device, whether it has a pass in the newest round */
    int8_t *in_last;     /* of each device, whether it was in the last pass */
    int64_t *passes;     /* over each device, that have reached any of the parameters; the caller sets them to 0 */
    int64_t thread;      /* that did the last pass */
    int32_t round;       /* the number of the newest one */
    int32_t first_run;   /* how many passes the newest round began with on its first device, before another one's */
    int32_t run;         /* how many passes the last device has had at once */
    int32_t is_unclear;  /* whether several threads have done the passes, so that all that is marked counts */
    int32_t has_news;    /* whether marks may have been set since `note` */
    int32_t has_rounds;  /* whether any of `rounds` may be above 0 */
    int32_t is_hidden;   /* whether MXNet's marks of what has a round are taken away while a pass runs */
} Marks;

#endif
