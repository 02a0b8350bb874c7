/* Statistics of devices or processes, combined exactly for shards of any size. */
#include "combine.h"

#include <math.h>
#include <string.h>

#include "external.h"

/* The sum of squares is never formed: at a mean of 1e6 and a variance of 1, the variance would be the 40th of float64's
   53 bits. The mean is computed from offsets from one row's mean, so rows with equal means give exactly this mean. */
static void combine_moments(const double *rows, int64_t num, int64_t stride, int64_t size, double *result)
{
    int64_t channels = (size - 1) / 2;
    const double *origin = 0;
    double count = 0, *mean = result + 1, *m2 = mean + channels;
    for (int64_t n = 0; n < num; n++) {
        const double *row = rows + n * stride;
        count += row[0];
        if (!origin && row[0] > 0)
            origin = row + 1;
    }
    memset(result, 0, (size_t)size * sizeof(double));
    if (!origin)
        return;
    result[0] = count;
    for (int64_t n = 0; n < num; n++) {
        const double *row = rows + n * stride;
        for (int64_t c = 0; c < channels; c++)
            mean[c] += row[0] * (row[1 + c] - origin[c]);
    }
    for (int64_t c = 0; c < channels; c++)
        mean[c] = origin[c] + mean[c] / count;
    for (int64_t n = 0; n < num; n++) {
        const double *row = rows + n * stride;
        if (row[0] <= 0)
            continue;
        for (int64_t c = 0; c < channels; c++) {
            double d = row[1 + c] - mean[c];
            m2[c] += row[1 + channels + c] + row[0] * (d * d);
        }
    }
}

void combine(const double *rows, int64_t num, int64_t stride, int64_t size, int64_t direction, double *result)
{
    if (direction == FORWARD) {
        combine_moments(rows, num, stride, size, result);
        return;
    }
    memset(result, 0, (size_t)size * sizeof(double));
    for (int64_t n = 0; n < num; n++)
        for (int64_t i = 0; i < size; i++)
            result[i] += rows[n * stride + i];
}

EXPORT void gp_combine_statistics(const double *rows, int64_t num, int64_t size, int64_t direction, double *result)
{
    combine(rows, num, size, size, direction, result);
}

EXPORT void gp_combine_messages(const double *rows, int64_t num, int64_t size, int64_t direction, double *result)
{
    combine(rows + HEADER, num, size, size - HEADER, direction, result + HEADER);
    result[0] = 0;
    result[1] = rows[1];
    for (int64_t n = 0; n < num; n++) {
        result[0] += rows[n * size];
        if (rows[n * size + 1] != result[1])
            result[1] = NAN;
    }
}
