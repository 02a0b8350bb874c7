/* Choice of the versions for this processor: SyncBatchNorm's arithmetic in memory, and sums of arrays. */
#include "external.h"
#include "kernels.h"
#include "sums.h"

#define VERSIONS_OF(processor)                                                                                        \
    extern sum_function sum_arrays_##processor;                                                                       \
    extern const Sums kernels_float_##processor, kernels_double_##processor;                                          \
    extern const Elementwise elementwise_float_##processor, elementwise_double_##processor;

#if defined(__x86_64__)
#define EACH(name) {&name##_baseline, &name##_avx2, &name##_avx512}
VERSIONS_OF(baseline)
VERSIONS_OF(avx2)
VERSIONS_OF(avx512)
#else
#define EACH(name) {&name##_baseline}
VERSIONS_OF(baseline)
#endif

static sum_function *const all_sums[NUM_PROCESSORS] = EACH(sum_arrays);
static const Sums *const kernels[2][NUM_PROCESSORS] = {EACH(kernels_float), EACH(kernels_double)};
static const Elementwise *const elementwise[2][NUM_PROCESSORS] = {EACH(elementwise_float), EACH(elementwise_double)};

sum_function *sum_arrays;
static Arithmetic in_memory[2][NUM_PROCESSORS];

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

/* The arithmetic of float32 or float64, in the version for that processor, or for this machine's if it is below 0. */
EXPORT const Arithmetic *gp_arithmetic_in_memory(int64_t is_double, int64_t processor)
{
    int64_t number = processor < 0 ? gp_processor() : processor;
    return &in_memory[is_double != 0][number < 0 ? BASELINE : number];
}

/* Sum arrays by the version for that processor, for tests; see `sums.h`. */
EXPORT void gp_sum_arrays(int64_t processor, int64_t from, int64_t to, char *const *sources, int64_t num, char *out,
                          int64_t size)
{
    (processor < 0 ? sum_arrays : all_sums[processor])(from, to, sources, 0, num, out, 0, size);
}

__attribute__((constructor)) static void choose(void)
{
    int64_t number = gp_processor();
    sum_arrays = all_sums[number < 0 ? BASELINE : number]; /* Python refuses a wrong name */
    for (int is_double = 0; is_double < 2; is_double++)
        for (int n = 0; n <= gp_best_processor(); n++) {
            const Sums *sums = kernels[is_double][n];
            const Elementwise *others = elementwise[is_double][n];
            in_memory[is_double][n] = (Arithmetic){
                open_in_memory, sums->measure,     others->take_batch, others->take_running,
                others->normalise, sums->sums, others->gradient,   close_in_memory,
            };
        }
}
