/* The custom operator as MXNet calls it: its description, its instances, and their forward and backward pass.

   MXNet calls the description's functions in the thread that traces or launches the operator, and the passes without
   Python's lock in a thread where they may wait, on any device. What goes wrong in a pass is left to Python.

   MXNet takes every result but 0 for success, and a Python callback that raises, also by Ctrl-C before its first line,
   returns an arbitrary value. So MXNet calls only these C functions. They call Python, and report success only if Python
   has filled the result in memory. */
#include "sync_batch_norm.h"

#include <math.h>
#include <string.h>

enum { DATA, Y = 3 };                                  /* indices in MXNet's list: x, gamma, beta; y, running mean, running variance */
enum { IS_FLOAT32 = 0, IS_FLOAT16 = 2, UNKNOWN = -1 }; /* MXNet's numbers of dtypes */

EXPORT int gp_list(const char ***result, const char **names)
{
    *result = names;
    return 1;
}

/* x (..., C, ...) gives y of its shape, and (C,) for the rest. */
EXPORT int gp_infer_shape(int num, int *num_axes, int **shapes, const Description *description)
{
    int size = num_axes[DATA], *data = shapes[DATA];
    if (size <= 0) { /* not known yet */
        for (int n = 0; n < num; n++)
            num_axes[n] = n >= Y || num_axes[n] < 0 ? 0 : num_axes[n];
        return 1;
    }
    int64_t axis = description->axis + (description->axis < 0 ? size : 0);
    if (axis < 0 || axis >= size)
        return 0;
    for (int n = 0; n < num; n++)
        if (n != DATA && n != Y)
            num_axes[n] = 1, shapes[n] = data + axis;
    num_axes[Y] = size, shapes[Y] = data;
    return 1;
}

/* y is like x; the rest float32 beside float16, else like x unless it is known; the running mean is like gamma, the running
   variance like beta. */
EXPORT int gp_infer_type(int num, int *dtypes, const Description *description)
{
    (void)num, (void)description;
    for (int n = 1; n < Y; n++)
        if (dtypes[n] == UNKNOWN)
            dtypes[n] = dtypes[DATA] == IS_FLOAT16 ? IS_FLOAT32 : dtypes[DATA];
    dtypes[Y] = dtypes[DATA], dtypes[Y + 1] = dtypes[1], dtypes[Y + 2] = dtypes[2];
    return 1;
}

/* What MXNet keeps for the backward pass: dy, x, gamma, and y where that is asked for. */
EXPORT int gp_declare_backward_dependency(const int *dy, const int *inputs, const int *outputs, int *num, int **result,
                                          const Description *description)
{
    (void)dy, (void)inputs, (void)outputs;
    *num = (int)description->num_dependencies;
    *result = description->dependencies;
    return 1;
}

/* An instance for one device. */
EXPORT int gp_create(const char *device, int num, unsigned **shapes, const int *num_axes, const int *dtypes,
                     CallbackList *result, Description *description)
{
    result->num = 0;
    gp_external.create(device, num, shapes, num_axes, dtypes, result, description);
    return result->num != 0;
}

/* What MXNet calls to delete a description that could not be made. */
static int nothing(void *context)
{
    (void)context;
    return 1;
}

/* A description for these attributes. Python replaces the list of one callback by the operator's; if it is still there,
   Python has failed, and MXNet deletes the description all the same. */
EXPORT int gp_describe(const char *name, int num, char **keys, char **values, CallbackList *result)
{
    static void *functions[] = {(void *)nothing}, *contexts[] = {0};
    (void)name;
    *result = (CallbackList){1, functions, contexts};
    gp_external.describe(num, keys, values, result);
    return result->num != 1;
}

/* Run a stage of the operator's arithmetic, unless an earlier one has failed. */
static void run(State *op, void (*stage)(State *))
{
    if (!op->failed)
        stage(op);
}

/* The message becomes that of all devices and processes. */
static void allreduce(State *op, int64_t direction)
{
    if (op->failed)
        return;
    op->arrived_at = now(CLOCK_MONOTONIC);
    op->complete_at = gp_allreduce(op, 2 * op->call + direction);
    if (!op->complete_at)
        op->failed = NOT_REDUCED;
    op->reduced_at = now(CLOCK_MONOTONIC);
}

/* Close the pass and free MXNet's handles. After a failure, Python takes arrays[first..after), which the pass should have
   written, with their handles, and fails them. Returns 0 only if Python could not do so. */
static int finish(State *op, void **arrays, int num, int first, int after)
{
    _Bool reported = 1;
    op->arithmetic->close(op);
    if (op->failed)
        reported = !gp_external.fail(op, op->failed, after - first, arrays + first);
    for (int n = 0; n < num; n++)
        if (!op->failed || n < first || n >= after)
            gp_external.MXNDArrayFree(arrays[n]);
    return reported;
}

static void run_forward(State *op, _Bool is_training)
{
    const Arithmetic *steps = op->arithmetic;
    int64_t channels = op->channels;
    double *message = op->message;
    run(op, steps->open);
    if (is_training && !op->constant) {
        /* All devices' (count, mean, squared deviations), in one message, so each layer waits once. */
        op->call = op->calls->value++;
        run(op, steps->measure);
        if (op->layer->without_samples)
            memset(message, 0, (1 + 2 * (size_t)channels) * sizeof(double));
        allreduce(op, FORWARD);
        op->count = message[0];
        for (int64_t c = 0; c < channels; c++) {
            op->mean[c] = message[1 + c];
            op->variance[c] = message[1 + channels + c] / (op->count > 1 ? op->count : 1);
        }
        run(op, op->count > 0 ? steps->use_batch : steps->use_running); /* 0: all processes are without samples */
    } else {
        run(op, steps->use_running);
    }
    for (int64_t c = 0; c < channels; c++)
        op->rstd[c] = 1 / sqrt(op->variance[c] + op->epsilon);
    if (op->y)
        run(op, steps->normalise);
    op->valid = !op->failed;
}

static void run_backward(State *op)
{
    const Arithmetic *steps = op->arithmetic;
    if (!op->valid)
        op->failed = NO_FORWARD;
    run(op, steps->open);
    if (op->call >= 0 || op->dgamma || op->dbeta)
        run(op, steps->sums);
    if (op->call >= 0)
        allreduce(op, BACKWARD);
    if (op->dx)
        run(op, steps->gradient);
}

/* MXNet's forward callback: x, gamma, beta; y; running mean and variance. */
EXPORT int gp_forward(int num, void **arrays, const int *tags, const int *requests, int is_training, State *op)
{
    (void)tags;
    int64_t began = now(CLOCK_MONOTONIC), processor = now(CLOCK_THREAD_CPUTIME_ID);
    op->valid = op->failed = 0; /* what a failed forward pass must not leave to the backward pass */
    op->call = -1;
    op->x = arrays[0], op->gamma = arrays[1], op->beta = arrays[2];
    op->running_mean = arrays[4], op->running_variance = arrays[5];
    op->y = requests[0] == NOTHING ? 0 : arrays[3];
    op->adds = requests[0] == ADD;
    op->dy = op->dx = op->dgamma = op->dbeta = 0;
    run_forward(op, is_training != 0);
    int result = finish(op, arrays, num, 3, 4);
    add_spent(op, FORWARD, began, now(CLOCK_THREAD_CPUTIME_ID) - processor);
    return result;
}

/* MXNet's backward callback. Read: dy, x, gamma; beta and y have places but are not used. Written: dx, dgamma, dbeta.
   The running mean and variance follow. */
EXPORT int gp_backward(int num, void **arrays, const int *tags, const int *requests, int is_training, State *op)
{
    (void)tags, (void)is_training;
    int64_t began = now(CLOCK_MONOTONIC), processor = now(CLOCK_THREAD_CPUTIME_ID);
    op->failed = 0;
    op->beta = op->y = op->running_mean = op->running_variance = 0;
    op->dy = arrays[0], op->x = arrays[1], op->gamma = arrays[2];
    op->dx = requests[0] == NOTHING ? 0 : arrays[5];
    op->dgamma = requests[1] == NOTHING ? 0 : arrays[6];
    op->dbeta = requests[2] == NOTHING ? 0 : arrays[7];
    op->adds = requests[0] == ADD, op->adds_gamma = requests[1] == ADD, op->adds_beta = requests[2] == ADD;
    run_backward(op);
    int result = finish(op, arrays, num, 5, 8);
    add_spent(op, BACKWARD, began, now(CLOCK_THREAD_CPUTIME_ID) - processor);
    return result;
}

/* MXNet's callback when it has no use for an operator or its description: call Python, unless that has ended.

   MXNet calls it from destructors, in any thread and at any time. Python would end a thread that came after its end, and
   C++ the process. */
EXPORT int gp_delete(Deletion *asked)
{
    Interpreter *python = asked->python; /* the call frees `asked` */
    python->num_calls++;
    if (!python->has_ended)
        asked->function(asked->argument);
    python->num_calls--;
    return 1;
}
