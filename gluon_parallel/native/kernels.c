/* SyncBatchNorm's sums over values in memory [per processor and type] [sums in any order].

   Every value is read from memory once: a chunk small enough for the cache is summed, then its squared deviations from
   its own mean; chunks combine like shards do. So no square of a large mean is ever formed, and a channel whose values
   are all equal to one float32 number has m2 == 0 exactly. [...] are instructions to build.py. */
#include "processor.h"

#include <string.h>

#define CHUNK 4096 /* values that stay in the first-level cache between the two loops over them */

/* Channels last, or no further axes: neighbours in memory are other channels. */
static void measure_rows(const REAL *restrict x, int64_t outer, int64_t channels, double *restrict scratch,
                         double *restrict mean, double *restrict m2)
{
    double *restrict sum = scratch, *restrict deviation = scratch + channels;
    int64_t rows = CHUNK / channels > 1 ? CHUNK / channels : 1;
    for (int64_t start = 0; start < outer; start += rows) {
        int64_t num = outer - start < rows ? outer - start : rows;
        const REAL *restrict block = x + start * channels;
        memset(scratch, 0, 2 * (size_t)channels * sizeof(double));
        for (int64_t n = 0; n < num; n++)
            for (int64_t c = 0; c < channels; c++)
                sum[c] += (double)block[n * channels + c];
        for (int64_t c = 0; c < channels; c++)
            sum[c] /= (double)num; /* now the chunk's mean */
        for (int64_t n = 0; n < num; n++)
            for (int64_t c = 0; c < channels; c++) {
                double d = (double)block[n * channels + c] - sum[c];
                deviation[c] += d * d;
            }
        double share = (double)num / (double)(start + num);
        for (int64_t c = 0; c < channels; c++) {
            double d = sum[c] - mean[c];
            mean[c] += d * share;
            m2[c] += deviation[c] + d * d * ((double)start * share);
        }
    }
}

static void measure_chunk(const REAL *restrict x, int64_t num, int64_t seen, double *mean, double *m2)
{
    double sum = 0, square = 0;
    for (int64_t i = 0; i < num; i++)
        sum += (double)x[i];
    double average = sum / (double)num;
    for (int64_t i = 0; i < num; i++) {
        double d = (double)x[i] - average;
        square += d * d;
    }
    double share = (double)num / (double)(seen + num), d = average - *mean;
    *mean += d * share;
    *m2 += square + d * d * ((double)seen * share);
}

void PER_TYPE(measure)(State *op)
{
    int64_t outer = op->outer, channels = op->channels, inner = op->inner;
    const REAL *x = op->x;
    double *mean = op->message + 1, *m2 = mean + channels;
    memset(op->message, 0, (1 + 2 * (size_t)channels) * sizeof(double));
    op->message[0] = (double)(outer * inner);
    if (inner == 1) {
        measure_rows(x, outer, channels, op->scratch, mean, m2);
        return;
    }
    for (int64_t n = 0; n < outer; n++)
        for (int64_t c = 0; c < channels; c++)
            for (int64_t start = 0; start < inner; start += CHUNK) {
                int64_t num = inner - start < CHUNK ? inner - start : CHUNK;
                measure_chunk(x + (n * channels + c) * inner + start, num, n * inner + start, &mean[c], &m2[c]);
            }
}

/* total: sum of dy; dot: sum of dy * (x - mean), per channel. */
static void sum_rows(const REAL *restrict x, const REAL *restrict dy, int64_t outer, int64_t channels,
                     const double *restrict mean, double *restrict total, double *restrict dot)
{
    for (int64_t n = 0; n < outer; n++)
        for (int64_t c = 0; c < channels; c++) {
            double g = (double)dy[n * channels + c];
            total[c] += g;
            dot[c] += g * ((double)x[n * channels + c] - mean[c]);
        }
}

static void sum_channel(const REAL *restrict x, const REAL *restrict dy, int64_t inner, double mean, double *total,
                        double *dot)
{
    double s = 0, d = 0;
    for (int64_t i = 0; i < inner; i++) {
        double g = (double)dy[i];
        s += g;
        d += g * ((double)x[i] - mean);
    }
    *total += s;
    *dot += d;
}

void PER_TYPE(sums)(State *op)
{
    int64_t outer = op->outer, channels = op->channels, inner = op->inner;
    const REAL *x = op->x, *dy = op->dy;
    REAL *dgamma = op->dgamma, *dbeta = op->dbeta;
    double *total = op->message, *dot = total + channels;
    memset(op->message, 0, 2 * (size_t)channels * sizeof(double));
    if (inner == 1)
        sum_rows(x, dy, outer, channels, op->mean, total, dot);
    else
        for (int64_t n = 0; n < outer; n++)
            for (int64_t c = 0; c < channels; c++) {
                int64_t begin = (n * channels + c) * inner;
                sum_channel(x + begin, dy + begin, inner, op->mean[c], &total[c], &dot[c]);
            }
    for (int64_t c = 0; dgamma && c < channels; c++) {
        double value = op->fix_gamma ? 0 : dot[c] * op->rstd[c];
        dgamma[c] = (REAL)(op->adds_gamma ? (double)dgamma[c] + value : value);
    }
    for (int64_t c = 0; dbeta && c < channels; c++)
        dbeta[c] = (REAL)(op->adds_beta ? (double)dbeta[c] + total[c] : total[c]);
}
