/* Labels that are numbers of classes: which are none. */
#ifndef LABELS_H
#define LABELS_H

#include <stdint.h>

#include "external.h"

/* What is known of the labels of a training. The record is Python's, and stays to the end of the process. */
typedef struct LabelCheck {
    int64_t class_axis;   /* of the outputs; below 0: counted from the back */
    int64_t batch_axis;   /* of the labels */
    int64_t has_ignored;  /* whether one value is no class, and allowed */
    double ignored;
    /* The first label that is no class; all of this is there when `found` is FOUND_LABEL. */
    _Atomic int64_t found;
    int64_t step;
    int64_t sample;       /* its place in the batch */
    int64_t num_classes;
    double value;
    _Atomic int32_t num_pending; /* looks that the engine has not ended */
} LabelCheck;

/* What `gp_look_at_labels` returns; below 0: MXNet's error. */
enum { NO_FINDING = 0, FOUND_LABEL = 1, NOT_ON_HOST = 2 };

#endif
