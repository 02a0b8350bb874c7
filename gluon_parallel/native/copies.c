/* Copies of the same arrays on the devices of this process: their sums. */
#include "copies.h"

#include <stdlib.h>
#include <string.h>

#include "sums.h"

#define BLOCK (128 * 1024) /* bytes of each array, which stay in the cache until the sum is written to all */

/* A list that waits in the engine; its handles are its own. */
typedef struct List {
    int64_t num;
    int64_t num_values;
    int64_t dtype;
    double scale;
    void *handles[];
} List;

static void multiply(char *block, int64_t dtype, int64_t num_values, double scale)
{
    float *floats = (float *)block;
    double *doubles = (double *)block;
    for (int64_t i = 0; i < num_values; i++) {
        if (dtype == FLOAT64)
            doubles[i] *= scale;
        else
            floats[i] *= (float)scale;
    }
}

/* Each array of the list becomes the sum of all. Called by the engine when they are ready. */
static void sum_list(void *run_context, void *param)
{
    List *list = param;
    char *arrays[list->num];
    (void)run_context;
    for (int64_t i = 0; i < list->num; i++)
        gp_external.MXNDArrayGetData(list->handles[i], &arrays[i]);
    int64_t size = size_of(list->dtype), step = BLOCK / size;
    for (int64_t begin = 0; begin < list->num_values; begin += step) {
        int64_t num = list->num_values - begin < step ? list->num_values - begin : step;
        sum_arrays(list->dtype, list->dtype, arrays, 0, list->num, arrays[0], begin, begin + num);
        if (list->scale != 1)
            multiply(arrays[0] + begin * size, list->dtype, num, list->scale);
        for (int64_t i = 1; i < list->num; i++)
            memcpy(arrays[i] + begin * size, arrays[0] + begin * size, (size_t)(num * size));
    }
}

/* The list that this thread hands to the engine, until it is freed: whether MXNet has freed one that it refuses. */
static _Thread_local void *pushed;

/* Called by the engine when it needs the list no longer, whether it was summed or its arrays had failed. */
static void free_list(void *param)
{
    List *list = param;
    for (int64_t i = 0; i < list->num; i++)
        gp_external.MXNDArrayFree(list->handles[i]);
    free(list);
    if (param == pushed)
        pushed = NULL;
}

/* Have MXNet's engine sum the lists, the first ones earlier than the others; does not wait. Returns 0, or another number
   if MXNet has refused one; the error is MXNet's. */
EXPORT int64_t gp_push_sums(const CopySums *sums, int64_t priority)
{
    int64_t num = sums->num_copies;
    for (int64_t i = 0; i < sums->num_lists; i++) {
        List *list = calloc(1, sizeof(List) + (size_t)num * sizeof(void *));
        if (!list)
            return -1;
        list->num_values = sums->num_values[i], list->dtype = sums->dtypes[i], list->scale = sums->scale;
        for (; list->num < num; list->num++) {
            if (gp_external.MXShallowCopyNDArray(sums->handles[i * num + list->num], &list->handles[list->num])) {
                free_list(list);
                return -1;
            }
        }
        pushed = list;
        if (gp_external.MXEnginePushSyncND((void *)sum_list, list, (void *)free_list, sums->devices + 2 * i, 0, 0,
                                           list->handles, (int)num, 0, (int)(priority - i), "gluon_parallel.allreduce")) {
            if (pushed)
                free_list(list);
            return -1;
        }
    }
    return 0;
}

/* A value is NaN or infinite where all bits of its exponent are set. */
static int64_t is_finite_float(const uint32_t *bits, int64_t num)
{
    uint32_t found = 0;
    for (int64_t i = 0; i < num; i++)
        found |= (bits[i] & 0x7f800000u) == 0x7f800000u;
    return !found;
}

static int64_t is_finite_double(const uint64_t *bits, int64_t num)
{
    uint64_t found = 0;
    for (int64_t i = 0; i < num; i++)
        found |= (bits[i] & 0x7ff0000000000000u) == 0x7ff0000000000000u;
    return !found;
}

/* Find out whether no value of the arrays is NaN or infinite. Called by the engine. */
EXPORT void gp_find_finite(void *run_context, const OnComplete *on_complete, FiniteLook *look)
{
    int64_t is_finite = 1;
    void *values;
    (void)run_context;
    for (int64_t n = 0; n < look->num && is_finite; n++) {
        gp_external.MXNDArrayGetData(look->handles[n], &values);
        is_finite = look->dtypes[n] == FLOAT64 ? is_finite_double(values, look->num_values[n])
                                               : is_finite_float(values, look->num_values[n]);
    }
    look->is_finite = is_finite;
    look->has_ended = 1;
    complete(on_complete, 0);
}
