/* Choice of the versions for this processor: SyncBatchNorm's arithmetic in memory, and sums of arrays. */
#include "external.h"
#include "kernels.h"
#include "sums.h"

static void *values_of(State *op, void *array)
{
    void *values = 0; /* the array is in the plain layout, so this waits for nothing */
    if (array && (gp_external.MXNDArrayGetData(array, &values) || !values))
        op->failed = MXNET_FAILED;
    return values;
}

static void open_in_memory(State *op)
{
    void **arrays[] = {&op->x,  &op->gamma, &op->beta,   &op->y,     &op->running_mean, &op->running_variance,
                       &op->dy, &op->dx,    &op->dgamma, &op->dbeta};
    for (unsigned n = 0; n < sizeof arrays / sizeof *arrays; n++)
        *arrays[n] = values_of(op, *arrays[n]);
}

static void close_in_memory(State *op)
{
    (void)op; /* kernels on memory hold no handles */
}

#define STEPS(version)                                                                                                 \
    {open_in_memory,      measure_##version, take_batch_##version, take_running_##version,                             \
     normalise_##version, sums_##version,    gradient_##version,   close_in_memory}
#define VERSION(processor) {sum_arrays_##processor, {STEPS(float_##processor), STEPS(double_##processor)}}

static const struct Version {
    sum_function *sum_arrays;
    Arithmetic arithmetic[2]; /* of float32 and of float64 */
} versions[NUM_PROCESSORS] = {
    VERSION(baseline),
#if defined(__x86_64__)
    VERSION(avx2),
    VERSION(avx512),
#endif
};

/* That of a processor; below 0: of this machine's, or of the simplest where the variable names none, which Python refuses. */
static const struct Version *version_of(int64_t processor)
{
    int64_t number = processor < 0 ? gp_processor() : processor;
    return &versions[number < 0 ? BASELINE : number];
}

EXPORT const Arithmetic *gp_arithmetic_in_memory(int64_t is_double, int64_t processor)
{
    return &version_of(processor)->arithmetic[is_double != 0];
}

EXPORT void gp_sum_arrays(int64_t processor, int64_t from, int64_t to, char *const *sources, int64_t num, char *out,
                          int64_t size)
{
    version_of(processor)->sum_arrays(from, to, sources, 0, num, out, 0, size);
}

sum_function *sum_arrays;

__attribute__((constructor)) static void choose(void)
{
    sum_arrays = version_of(-1)->sum_arrays;
}
