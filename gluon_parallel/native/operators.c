/* Arithmetic of SyncBatchNorm by MXNet's operators: runs the graphs of Python's `operator_graphs` through MXNet's C API.

   It serves GPUs, float16 and mixed precisions. */
#include "sync_batch_norm.h"

#include <math.h>

/* The array that a C function has made, which is freed at the end of the pass. */
static void *temporary(State *op, int status, void *array)
{
    if (status) {
        op->failed = MXNET_FAILED;
        return 0;
    }
    return op->temporaries[op->num_temporaries++] = array;
}

/* An array without memory, which the operator that writes to it makes. */
static void *new_array(State *op)
{
    void *array = 0;
    int status = gp_external.MXNDArrayCreateNone(&array);
    return temporary(op, status, array);
}

/* Queue a graph that writes to these arrays. */
static void run(State *op, int number, int num_outputs, void **outputs)
{
    if (op->failed)
        return;
    const Graph *graph = &op->graphs[number];
    int num = (int)graph->num_inputs;
    void *inputs[MOST_INPUTS];
    for (int i = 0; i < num; i++)
        inputs[i] = *(void **)((char *)op + graph->inputs[i]);
    int status = graph->num_parameters
                     ? gp_external.MXImperativeInvoke(graph->handle, num, inputs, &num_outputs, &outputs,
                                                      (int)graph->num_parameters, graph->keys, graph->values)
                     : gp_external.MXInvokeCachedOp(graph->handle, num, inputs, &num_outputs, &outputs);
    if (status)
        op->failed = MXNET_FAILED;
}

/* array += value */
static void add_to(State *op, void *array, void *value)
{
    op->total = array;
    op->value = value;
    run(op, ADD_TO, 1, &array);
}

/* Write the only output of a graph to an array, or add it. */
static void write(State *op, int number, void *array, int64_t adds)
{
    void *output = adds ? new_array(op) : array;
    run(op, number, 1, &output);
    if (adds)
        add_to(op, array, output);
}

/* A copy in the dtype that is computed in. */
static void *widened(State *op, void *array)
{
    void *copy = new_array(op);
    op->value = array;
    run(op, WIDEN, 1, &copy);
    return copy;
}

/* The same memory as (outer, C, inner); NULL for no array. */
static void *shaped(State *op, void *array)
{
    int64_t shape[] = {op->outer, op->channels, op->inner};
    void *view = 0;
    if (!array || op->failed)
        return 0;
    int status = gp_external.MXNDArrayReshape64(array, 3, shape, 0, &view);
    return temporary(op, status, view);
}

/* Wait for an array, and copy it to `op->staging`. */
static void copy_from_device(State *op, void *array, int64_t size)
{
    if (op->failed || gp_external.MXNDArraySyncCopyToCPU(array, op->copied, (uint64_t)size)) {
        op->failed = MXNET_FAILED;
        return;
    }
    for (int64_t i = 0; !op->is_double && i < size; i++)
        op->staging[i] = (double)((float *)op->copied)[i];
}

/* Copy `op->staging` to an array. */
static void copy_to_device(State *op, void *array, int64_t size)
{
    for (int64_t i = 0; !op->is_double && i < size; i++)
        ((float *)op->copied)[i] = (float)op->staging[i];
    if (op->failed || gp_external.MXNDArraySyncCopyFromCPU(array, op->copied, (uint64_t)size))
        op->failed = MXNET_FAILED;
}

static void open_operators(State *op)
{
    op->x = shaped(op, op->x), op->y = shaped(op, op->y), op->dy = shaped(op, op->dy), op->dx = shaped(op, op->dx);
    op->scale = op->fix_gamma ? op->ones : op->gamma;
    op->scaled = op->dx;
    if (op->is_narrow)
        op->x = widened(op, op->x);
    if (op->gamma_is_narrow)
        op->scale = widened(op, op->scale);
    if (op->dy && (op->is_narrow || op->adds || !op->dx))
        op->dy = op->scaled = widened(op, op->dy);
}

static void close_operators(State *op)
{
    for (int64_t n = 0; n < op->num_temporaries; n++)
        gp_external.MXNDArrayFree(op->temporaries[n]);
    op->num_temporaries = 0;
}

static void measure(State *op)
{
    int64_t channels = op->channels;
    double count = (double)(op->outer * op->inner), *staging = op->staging;
    op->centred = new_array(op);
    op->origin = op->centre;
    run(op, MEASURE, 4, (void *[]){op->centred, op->pivot, op->centre, op->batch_variance});
    copy_from_device(op, op->measured_rows, 3 * channels);
    op->message[0] = count;
    for (int64_t c = 0; c < channels; c++) {
        op->message[1 + c] = staging[c] + staging[channels + c];
        op->message[1 + channels + c] = staging[2 * channels + c] * count;
    }
}

/* Fills the rows of `BATCH_ROWS` in `operator_graphs.py` but the first, in their order. */
static void use_batch(State *op)
{
    int64_t channels = op->channels;
    double *mean = op->mean, *variance = op->variance, *staging = op->staging;
    for (int64_t c = 0; c < channels; c++) {
        staging[channels + c] = mean[c] - staging[c]; /* the pivot is still there */
        staging[2 * channels + c] = variance[c];
        staging[3 * channels + c] = (1 - op->momentum) * mean[c];
        staging[4 * channels + c] = (1 - op->momentum) * variance[c];
        staging[5 * channels + c] = mean[c];
        mean[c] -= op->is_double ? mean[c] : (double)(float)mean[c]; /* from here on: what the device's mean lacks */
        staging[6 * channels + c] = mean[c] / sqrt(variance[c] + op->epsilon);
    }
    copy_to_device(op, op->batch_rows, 7 * channels);
    run(op, UPDATE_RUNNING, 2, (void *[]){op->running_mean, op->running_variance});
}

static void use_running(State *op)
{
    op->centred = op->x;
    op->origin = op->batch_mean;
    run(op, USE_RUNNING, 3, (void *[]){op->batch_mean, op->residual, op->batch_variance});
}

static void normalise(State *op)
{
    write(op, NORMALISE, op->y, op->adds);
}

/* Write `op->scaled` and the rows of sums; `op->dy` may be overwritten. */
static void run_sums(State *op)
{
    run(op, SUMS, 3, (void *[]){op->scaled, op->dot, op->sum_dy});
    op->dy = 0;
}

static void sums(State *op)
{
    int64_t channels = op->channels;
    run_sums(op);
    void *dgamma = !op->dgamma || op->adds_gamma ? new_array(op) : op->dgamma;
    void *dbeta = !op->dbeta || op->adds_beta ? new_array(op) : op->dbeta;
    run(op, PARAMETER_GRADIENTS, 2, (void *[]){dgamma, dbeta});
    if (op->dgamma && op->adds_gamma)
        add_to(op, op->dgamma, dgamma);
    if (op->dbeta && op->adds_beta)
        add_to(op, op->dbeta, dbeta);
    if (op->call < 0)
        return;
    copy_from_device(op, op->sums_rows, 2 * channels);
    for (int64_t c = 0; c < channels; c++) {
        op->message[c] = op->staging[c];
        op->message[channels + c] = op->staging[channels + c] / op->rstd[c] - op->mean[c] * op->staging[c];
    }
}

static void gradient(State *op)
{
    int64_t channels = op->channels;
    double count = op->count > 1 ? op->count : 1;
    if (op->dy)
        run_sums(op);
    if (op->call >= 0) {
        for (int64_t c = 0; c < channels; c++) {
            double rstd = op->rstd[c], slope = op->message[channels + c] * rstd * rstd / count;
            op->staging[c] = slope;
            op->staging[channels + c] = op->message[c] * rstd / count - slope * rstd * op->mean[c];
        }
        copy_to_device(op, op->gradient_rows, 2 * channels);
        write(op, GRADIENT, op->dx, op->adds);
    } else if (op->scaled != op->dx) {
        write(op, NARROW, op->dx, op->adds);
    }
}

EXPORT const Arithmetic *gp_arithmetic_of_operators(void)
{
    static const Arithmetic arithmetic = {open_operators, measure, use_batch, use_running,
                                          normalise,      sums,    gradient,   close_operators};
    return &arithmetic;
}
