/* Labels that are numbers of classes: which are none.

   MXNet's losses take the nearest class for a number that is negative or too large, and the one below it for a fraction.
   The engine looks at the labels when they are there; if they are already, the thread that asks for it does. */
#include "labels.h"

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sums.h"

enum { WRITING_LABEL = 2, BLOCK = 256, ON_GPU = 2, INTEGER = 0, UNSIGNED = 1, FLOAT = 2, BFLOAT = 4, BOOLEAN = 6 };

/* One look. The handle, a second one of the array, is its own. */
typedef struct Look {
    LabelCheck *check;
    void *label;
    int64_t step;
    int64_t begin; /* the index of the first sample in the batch */
    int64_t num_classes;
} Look;

/* Classes that halves can tell apart: whole numbers up to this one have a half of their own. */
static int64_t most_classes(int64_t code, int64_t bits)
{
    return bits > 16 || (code != FLOAT && code != BFLOAT) ? INT64_MAX : code == FLOAT ? 2048 : 256;
}

/* Convert values of one of DLPack's dtypes; returns 0 for one that is unknown. */
static int convert(int64_t code, int64_t bits, char *values, int64_t begin, int64_t num, double *out)
{
    char *from = values + begin * bits / 8;
    float floats[BLOCK];
    if (code == FLOAT && bits == 64) {
        for (int64_t i = 0; i < num; i++)
            out[i] = ((double *)from)[i];
    } else if (code == FLOAT || code == BFLOAT) {
        int64_t dtype = bits == 32 ? FLOAT32 : code == FLOAT ? FLOAT16 : BFLOAT16;
        sum_arrays(dtype, FLOAT32, &from, 0, 1, (char *)floats, 0, num);
        for (int64_t i = 0; i < num; i++)
            out[i] = floats[i];
    } else if (code == INTEGER && bits == 64) {
        for (int64_t i = 0; i < num; i++)
            out[i] = (double)((int64_t *)from)[i];
    } else if (code == INTEGER && bits == 32) {
        for (int64_t i = 0; i < num; i++)
            out[i] = ((int32_t *)from)[i];
    } else if (code == INTEGER && bits == 8) {
        for (int64_t i = 0; i < num; i++)
            out[i] = ((int8_t *)from)[i];
    } else if ((code == UNSIGNED || code == BOOLEAN) && bits == 8) {
        for (int64_t i = 0; i < num; i++)
            out[i] = ((uint8_t *)from)[i];
    } else {
        return 0;
    }
    return 1;
}

static int is_class(const LabelCheck *check, double value, int64_t num_classes)
{
    int is_number = value >= 0 && value < (double)num_classes; /* NaN is none */
    return (is_number && value == (double)(int64_t)value) || (check->has_ignored && value == check->ignored);
}

/* The index of the first of `num` values that is no class, or `num`. */
static int64_t first_other(const LabelCheck *check, const double *values, int64_t num, int64_t num_classes)
{
    int64_t index = 0;
    while (index < num && is_class(check, values[index], num_classes))
        index++;
    return index;
}

/* Look at the labels. Called by the engine. */
static void look_at(void *run_context, void *param)
{
    Look *look = param;
    LabelCheck *check = look->check;
    DLTensor *tensor;
    (void)run_context;
    if (gp_external.MXNDArrayToDLPack(look->label, &tensor))
        return; /* not in the plain layout: what a convolution on a CPU returns, which are no numbers of classes */
    int64_t code = tensor->dtype & 0xff, bits = tensor->dtype >> 8 & 0xff, axis = check->batch_axis;
    int64_t num = 1, per_sample = 1, num_samples = INT64_MAX;
    for (int64_t n = 0; n < tensor->num_axes; n++) {
        num *= tensor->shape[n];
        per_sample *= n > axis ? tensor->shape[n] : 1;
        num_samples = n == axis ? tensor->shape[n] : num_samples;
    }
    char *values = tensor->data + tensor->byte_offset;
    double block[BLOCK];
    for (int64_t begin = 0; begin < num && look->num_classes <= most_classes(code, bits); begin += BLOCK) {
        int64_t size = num - begin < BLOCK ? num - begin : BLOCK;
        if (!convert(code, bits, values, begin, size, block))
            break;
        int64_t index = first_other(check, block, size, look->num_classes), nothing = NO_FINDING;
        if (index == size)
            continue;
        if (atomic_compare_exchange_strong(&check->found, &nothing, WRITING_LABEL)) {
            check->step = look->step;
            check->sample = look->begin + (begin + index) / per_sample % num_samples;
            check->num_classes = look->num_classes;
            check->value = block[index];
            check->found = FOUND_LABEL;
        }
        break;
    }
    gp_external.MXNDArrayCallDLPackDeleter(tensor);
}

/* The look that this thread hands to the engine, until it is freed: whether MXNet has freed one that it refuses. */
static _Thread_local void *pushed;

/* Called by the engine when it needs the look no longer, whether it was done or the labels had failed. */
static void free_look(void *param)
{
    Look *look = param;
    LabelCheck *check = look->check;
    gp_external.MXNDArrayFree(look->label);
    free(look);
    if (param == pushed)
        pushed = NULL;
    if (--check->num_pending == 0)
        syscall(SYS_futex, &check->num_pending, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
}

/* Look at the labels of the samples from `begin` on of a step, whose outputs tell the number of classes; does not wait.
   Both are MXNet's handles. Returns what a look, this or an earlier one, has found by now. */
EXPORT int64_t gp_look_at_labels(LabelCheck *check, void *outputs, void *labels, int64_t step, int64_t begin)
{
    static const int on_cpu[2] = {1, 0}, at_once = 4; /* a `mxnet::Context`; FnProperty kAsync: it never waits */
    int device, number, num_axes;
    const int *shape;
    if (check->found == FOUND_LABEL)
        return FOUND_LABEL;
    if (gp_external.MXNDArrayGetContext(labels, &device, &number) ||
        gp_external.MXNDArrayGetShapeEx(outputs, &num_axes, &shape))
        return -1;
    int64_t axis = check->class_axis + (check->class_axis < 0 ? num_axes : 0);
    if (axis < 0 || axis >= num_axes)
        return NO_FINDING; /* the loss will refuse them */
    if (device == ON_GPU)
        return NOT_ON_HOST;
    Look *look = calloc(1, sizeof(Look));
    if (!look)
        return -1;
    *look = (Look){check, NULL, step, begin, shape[axis]};
    check->num_pending++;
    pushed = look;
    if (gp_external.MXShallowCopyNDArray(labels, &look->label) ||
        gp_external.MXEnginePushSyncND((void *)look_at, look, (void *)free_look, on_cpu, &look->label, 1, 0, 0, &at_once,
                                       0, "gluon_parallel.labels")) {
        if (pushed)
            free_look(look);
        return -1;
    }
    return check->found == FOUND_LABEL ? FOUND_LABEL : NO_FINDING;
}

/* Wait a moment, in which Python looks for Ctrl-C, for the looks that the engine has not ended; returns their number. */
EXPORT int64_t gp_await_labels(LabelCheck *check)
{
    struct timespec limit = timespec_of(SECOND / 10);
    int32_t num = check->num_pending;
    if (num)
        syscall(SYS_futex, &check->num_pending, FUTEX_WAIT, num, &limit, 0, 0);
    return check->num_pending;
}
