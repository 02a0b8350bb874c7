/* SyncBatchNorm's steps that compute each value by itself [per processor and type].

   [...] are instructions to build.py. Compiled without reordering: (x - high) - low must not become x - (high + low). */
#include "processor.h"

#include <string.h>

/* Inlined with a constant `adds`, so that the compiler makes vector instructions of the loop, without a branch. */
#define INLINE static inline __attribute__((always_inline))

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

static void use_batch(State *op)
{
    REAL *running_mean = op->running_mean, *running_variance = op->running_variance;
    double old = op->momentum, new = 1 - op->momentum;
    for (int64_t c = 0; c < op->channels; c++) {
        running_mean[c] = (REAL)(old * (double)running_mean[c] + new * op->mean[c]);
        running_variance[c] = (REAL)(old * (double)running_variance[c] + new * op->variance[c]);
    }
}

static void use_running(State *op)
{
    const REAL *running_mean = op->running_mean, *running_variance = op->running_variance;
    for (int64_t c = 0; c < op->channels; c++) {
        op->mean[c] = (double)running_mean[c];
        op->variance[c] = (double)running_variance[c];
    }
}

/* Fill rows 0 to 2 of `scratch` (5, C): high and low, with mean = high + low in x's precision, and rstd * gamma. So
   float32 keeps a large mean's digits: x - high is exact near it. */
static REAL *channel_constants(State *op)
{
    int64_t channels = op->channels;
    REAL *high = (REAL *)op->scratch, *low = high + channels, *scale = low + channels;
    const REAL *gamma = op->gamma;
    for (int64_t c = 0; c < channels; c++) {
        high[c] = (REAL)op->mean[c];
        low[c] = (REAL)(op->mean[c] - (double)high[c]);
        scale[c] = (REAL)(op->rstd[c] * (op->fix_gamma ? 1.0 : (double)gamma[c]));
    }
    return high;
}

/* y = ((x - high) - low) * scale + shift, or is added to */
INLINE void normalise_rows(const REAL *restrict x, REAL *restrict y, int64_t outer, int64_t channels,
                                  const REAL *restrict constants, const REAL *restrict shift, _Bool adds)
{
    const REAL *restrict high = constants, *restrict low = high + channels, *restrict scale = low + channels;
    for (int64_t n = 0; n < outer; n++, x += channels, y += channels)
        for (int64_t c = 0; c < channels; c++) {
            REAL value = ((x[c] - high[c]) - low[c]) * scale[c] + shift[c];
            y[c] = adds ? y[c] + value : value;
        }
}

INLINE void normalise_channel(const REAL *restrict x, REAL *restrict y, int64_t inner, REAL high, REAL low,
                                     REAL scale, REAL shift, _Bool adds)
{
    for (int64_t i = 0; i < inner; i++) {
        REAL value = ((x[i] - high) - low) * scale + shift;
        y[i] = adds ? y[i] + value : value;
    }
}

INLINE void normalise_all(State *op, _Bool adds)
{
    int64_t outer = op->outer, channels = op->channels, inner = op->inner;
    const REAL *x = op->x, *shift = op->beta, *constants = channel_constants(op);
    REAL *y = op->y;
    if (inner == 1) {
        normalise_rows(x, y, outer, channels, constants, shift, adds);
        return;
    }
    for (int64_t n = 0; n < outer; n++)
        for (int64_t c = 0; c < channels; c++, x += inner, y += inner)
            normalise_channel(x, y, inner, constants[c], constants[channels + c], constants[2 * channels + c],
                                     shift[c], adds);
}

static void normalise(State *op)
{
    op->adds ? normalise_all(op, 1) : normalise_all(op, 0);
}

/* dx = a * dy - b * ((x - high) - low) - k, or is added to */
INLINE void gradient_rows(const REAL *restrict x, const REAL *restrict dy, REAL *restrict dx, int64_t outer,
                                 int64_t channels, const REAL *restrict constants, _Bool adds)
{
    const REAL *restrict high = constants, *restrict low = high + channels, *restrict a = low + channels,
               *restrict b = a + channels, *restrict k = b + channels;
    for (int64_t n = 0; n < outer; n++, x += channels, dy += channels, dx += channels)
        for (int64_t c = 0; c < channels; c++) {
            REAL value = a[c] * dy[c] - b[c] * ((x[c] - high[c]) - low[c]) - k[c];
            dx[c] = adds ? dx[c] + value : value;
        }
}

INLINE void gradient_channel(const REAL *restrict x, const REAL *restrict dy, REAL *restrict dx, int64_t inner,
                                    REAL high, REAL low, REAL a, REAL b, REAL k, _Bool adds)
{
    for (int64_t i = 0; i < inner; i++) {
        REAL value = a * dy[i] - b * ((x[i] - high) - low) - k;
        dx[i] = adds ? dx[i] + value : value;
    }
}

INLINE void gradient_all(State *op, _Bool adds)
{
    int64_t outer = op->outer, channels = op->channels, inner = op->inner;
    const REAL *x = op->x, *dy = op->dy, *gamma = op->gamma;
    REAL *dx = op->dx, *constants = channel_constants(op), *b = constants + 3 * channels, *k = b + channels;
    double count = op->count > 1 ? op->count : 1;
    memset(b, 0, 2 * (size_t)channels * sizeof(REAL));
    if (op->call >= 0) /* else the statistics are constants, and nothing more depends on x */
        for (int64_t c = 0; c < channels; c++) {
            double rstd = op->rstd[c], factor = rstd * (op->fix_gamma ? 1.0 : (double)gamma[c]);
            b[c] = (REAL)(factor * rstd * rstd * op->message[channels + c] / count);
            k[c] = (REAL)(factor * op->message[c] / count);
        }
    if (inner == 1) {
        gradient_rows(x, dy, dx, outer, channels, constants, adds);
        return;
    }
    for (int64_t n = 0; n < outer; n++)
        for (int64_t c = 0; c < channels; c++, x += inner, dy += inner, dx += inner)
            gradient_channel(x, dy, dx, inner, constants[c], constants[channels + c], constants[2 * channels + c],
                                    b[c], k[c], adds);
}

static void gradient(State *op)
{
    op->adds ? gradient_all(op, 1) : gradient_all(op, 0);
}

const Arithmetic PER_TYPE(arithmetic) = {open_in_memory, PER_TYPE(measure), use_batch, use_running,
                                         normalise,      PER_TYPE(sums),    gradient,   close_in_memory};
